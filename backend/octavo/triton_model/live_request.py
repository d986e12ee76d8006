"""One accepted request until its final response: what was produced and what was sent.

Belongs to the thread that answers. Knows nothing of tensors, threads or the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.errors import RequestCancelled
from octavo.request import FinishReason, Request, SequenceTiming, TokenLogprobs, TokenOutput
from octavo.text.logprobs_text import logprobs_json
from octavo.text.output_text import OutputText
from octavo.text.tokenizer import Tokenizer, replace_nul
from octavo.triton_model.exchange import AnswerData, Arrival, ResponseData, ResponseOptions
from octavo.triton_model.pb_utils import ResponseSender
from octavo.triton_model.request_meter import NewTokens, RequestMeter


@dataclass(slots=True)
class _Answer:
    """One of the n answers, and what of it waits to be sent."""

    output: OutputText
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    is_timed: bool = False

    def take(self, output: TokenOutput) -> int:
        """Add what a step produced; return how many tokens of it count."""
        delta = self.output.push(output.token_ids, output.finish_reason)
        self.text.append(delta.text)
        self.token_ids += output.token_ids[: delta.num_tokens]
        logprobs = output.logprobs[: delta.num_tokens]
        self.logprobs += logprobs
        self.cumulative_logprob += sum(own.logprob for own, *_ in logprobs)
        self.finish_reason = delta.finish_reason
        return delta.num_tokens

    def pop(self, prompt: str, write: Callable[[TokenLogprobs], str] | None) -> AnswerData:
        text, token_ids = prompt + "".join(self.text), tuple(self.token_ids)
        logprobs = () if write is None else tuple(map(write, self.logprobs))
        self.text, self.token_ids, self.logprobs = [], [], []
        return AnswerData(text, token_ids, self.finish_reason, logprobs, self.cumulative_logprob)


class Taken(NamedTuple):
    """What became of an output of the engine."""

    is_cut: bool = False
    """Whether the answer ended here although the engine goes on: a stop string was found."""
    new_tokens: NewTokens = NewTokens(0)


def missed_deadline(request: Request) -> RequestCancelled:
    """Return the error for a request whose deadline passed before it had any token."""
    assert request.deadline_s is not None, f"{request.request_id} has no deadline"
    digits = f"{(request.deadline_s - request.arrival_s) * 1000.0:,.3f}"
    allowed_ms = digits.rstrip("0").rstrip(".")
    return RequestCancelled(
        f"the request passed its deadline of {allowed_ms} ms before its first token; "
        "send it again when fewer requests wait, or give it more time"
    )


class LiveRequest:
    """Text and tokens that wait to be sent to one client.

    Args:
        request: what the engine gets.
        arrival: when it came, and what else is told of it in the end.
        prompt: the prompt as text, sent before each answer if `options` ask for it.
        sender: where the responses go.
    """

    def __init__(
        self,
        request: Request,
        arrival: Arrival,
        options: ResponseOptions,
        sender: ResponseSender,
        tokenizer: Tokenizer,
        prompt: str,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.options = options
        self.sender = sender
        self.meter = RequestMeter(arrival.time_s, request.params.n)
        self._answers = [
            _Answer(OutputText(tokenizer, request.continued_token_ids, request.params))
            for _ in range(request.params.n)
        ]
        self._prompt = replace_nul(prompt) if options.include_prompt else ""
        self._write = functools.partial(logprobs_json, tokenizer)
        self._wants_logprobs = "logprobs" in options.outputs
        self._prompt_logprobs: list[str] | None = None
        if "prompt_logprobs" in options.outputs:
            self._prompt_logprobs = ["null"]  # nothing stands before the first token
        self._wants_timing = "timing" in options.outputs
        self._timing: SequenceTiming | None = None
        self._has_begun = False

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self.request.request_id

    def take(self, output: TokenOutput, now_s: float) -> Taken:
        """Add what a step produced for one answer, at a time by the monotonic clock."""
        answer = self._answers[output.index]
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += map(self._write, output.prompt_logprobs)
        self.take_timing(output)
        if answer.finish_reason is not None:
            return Taken()  # the engine had not heard yet of the stop string
        new_tokens = self.meter.take(output.index, answer.take(output), now_s)
        is_cut = answer.finish_reason is not None and output.finish_reason is None
        return Taken(is_cut, new_tokens)

    def take_timing(self, output: TokenOutput) -> None:
        """Keep what the last output of an answer says of its time."""
        if output.timing is not None:
            # The last to come is of the answer that ran longest, so its parts make up the whole.
            self._timing, self._answers[output.index].is_timed = output.timing, True

    @property
    def timing(self) -> SequenceTiming | None:
        """Where the engine's time went; None until it is known of all answers."""
        return self._timing if all(answer.is_timed for answer in self._answers) else None

    @property
    def has_missed_deadline(self) -> bool:
        """Whether its deadline passed before it had any token."""
        reasons = {answer.finish_reason for answer in self._answers}
        return FinishReason.DEADLINE in reasons and self.meter.first_token_s is None

    @property
    def has_response(self) -> bool:
        """Whether a response is due: the last, or in a stream one with text.

        Tokens without text yet (part of a character, or of what may be a stop string) wait for
        the text, so that no response is empty but a last one that only says why it is the last.
        That one waits for its timing.
        """
        if self._has_ended:
            return not self._wants_timing or self.timing is not None
        return self.options.stream and any(any(answer.text) for answer in self._answers)

    @property
    def can_wait(self) -> bool:
        """Whether what is due is neither the first response nor the last, so that more may join."""
        return self._has_begun and not self._has_ended

    @property
    def _has_ended(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._answers)

    def pop_response(self) -> ResponseData:
        """Return all that waits as one response; the prompt stands before the first."""
        write = self._write if self._wants_logprobs else None
        answers = tuple(answer.pop(self._prompt, write) for answer in self._answers)
        self._prompt, self._has_begun = "", True
        scored, self._prompt_logprobs = self._prompt_logprobs, None
        timing = self.timing if self._wants_timing else None
        return ResponseData(
            answers,
            len(self.request.prompt_token_ids),
            timing,
            None if scored is None else tuple(scored),
        )
