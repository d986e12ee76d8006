"""When a sequence ends by what it has generated; stop strings are the text's affair, not ours."""

from __future__ import annotations

from collections.abc import Collection

from octavo.request import FinishReason
from octavo.sequence import Sequence


class StopRule:
    """Ends of one model's sequences.

    Args:
        eos_token_ids: the model's own end-of-text ids.
        max_num_tokens: tokens, prompt and output, that one sequence may ever hold.
    """

    def __init__(self, eos_token_ids: Collection[int], max_num_tokens: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_num_tokens = max_num_tokens

    def ending_token_ids(self, sequence: Sequence) -> frozenset[int]:
        """Return the token ids that end `sequence`."""
        stops = frozenset(sequence.params.stop_token_ids)
        return stops if sequence.params.ignore_eos else stops | self._eos_token_ids

    def max_num_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens, prompt and output, `sequence` may have in the end."""
        most = sequence.num_prompt_tokens + (sequence.params.max_tokens or self._max_num_tokens)
        return min(most, self._max_num_tokens)

    def reason_to_end(self, sequence: Sequence) -> FinishReason | None:
        """Return why the last named token of `sequence` is its last, or None if it goes on."""
        num_tokens = len(sequence.token_ids) - sequence.num_pending_tokens
        params, token_id = sequence.params, sequence.token_ids[num_tokens - 1]
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.is_over:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= sequence.max_num_tokens else None
