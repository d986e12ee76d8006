"""What a client's request asks for, and what a response says, without tensors.

Knows nothing of their names, of threads or of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.request import FinishReason, SequenceTiming
from octavo.sampling_params import SamplingParams
from octavo.scheduling_params import SchedulingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, and by which names its client and the server's trace know it."""

    time_s: float
    """By the monotonic clock."""
    client_request_id: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client wants its responses to be."""

    stream: bool = False
    """Deltas as they come, rather than one response when all is done."""
    include_prompt: bool = True
    """The prompt stands before the text."""
    outputs: frozenset[str] = frozenset()
    """Names of the outputs to send beside `text_output`."""


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request as its client meant it; exactly one of `text`, `token_ids`, `messages` is set."""

    params: SamplingParams
    scheduling: SchedulingParams
    options: ResponseOptions
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: Any = None
    """Decoded JSON; whether these are chat messages is not checked here."""
    prompt_length: int = 0
    """Characters of the text or of the JSON, or number of ids: how long reading it may take."""


@dataclass(frozen=True, slots=True)
class AnswerData:
    """What one response says of one answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """None while it grows; the reason again in every response after its last."""
    logprobs: tuple[str, ...] = ()
    """Of each of `token_ids` an object in JSON, if they were asked for."""
    cumulative_logprob: float = 0.0
    """Sum over all tokens so far."""


@dataclass(frozen=True, slots=True)
class ResponseData:
    """The content of one response."""

    answers: tuple[AnswerData, ...]
    """All n of the request, in order."""
    num_input_tokens: int
    timing: SequenceTiming | None = None
    """On the last response, if it was asked for; of the answer that ended last."""
    prompt_logprobs: tuple[str, ...] | None = None
    """On the first response, if they were asked for: of each prompt token an object in JSON."""

    @property
    def is_final(self) -> bool:
        """Whether nothing follows it."""
        return all(answer.finish_reason is not None for answer in self.answers)
