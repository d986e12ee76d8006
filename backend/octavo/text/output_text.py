"""The visible text of one answer: detokenised, cut at stop strings, as certain deltas.

Knows nothing of the engine beyond token ids and finish reasons, nor of who reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.stop import StopStringFilter
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What new tokens add to the answer.

    `num_tokens` of them count: all, or those up to the one that completed a stop string, and then
    `finish_reason` is `STOP` although the engine went on.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None


class OutputText:
    """Turn one answer's tokens into text; nothing may be pushed after a delta with a finish reason.

    A token that ends the answer (end-of-text or a stop id) is counted but has no text, unless
    `include_stop_str_in_output` asks for it. Stop strings that end before the `min_tokens`-th token
    are passed on as ordinary text; text counts when it comes out, so held bytes count late.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._shows_stop = params.include_stop_str_in_output
        self._stops = StopStringFilter(params.stop, include=self._shows_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        """Take new tokens; `finish_reason` says that they are the last, and why."""
        silent_tail = finish_reason is FinishReason.STOP and not self._shows_stop
        pieces = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if silent_tail and index == len(token_ids) - 1:
                break
            piece, stopped = self._pass(self._detokenizer.push((token_id,)))
            pieces.append(piece)
            if stopped:
                return TextDelta("".join(pieces), index + 1, FinishReason.STOP)
        if finish_reason is not None:
            piece, stopped = self._pass(self._detokenizer.finish())
            pieces.append(piece if stopped else piece + self._stops.finish())
            finish_reason = FinishReason.STOP if stopped else finish_reason
        return TextDelta("".join(pieces), len(token_ids), finish_reason)

    def _pass(self, text: str) -> tuple[str, bool]:
        return self._stops.push(text, ignore=self._num_tokens < self._min_tokens)
