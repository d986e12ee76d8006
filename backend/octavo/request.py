"""What crosses between threads and processes: a request on its way in, tokens on their way out.

Everything here is frozen, small and picklable. Knows nothing of text, tensors or scheduling.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the value is what clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request.

    `arrival_s` is a monotonic time of the process that made the request. `params.max_tokens` and
    `params.seed` are always set here (`SamplingParams.resolve`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step produced for one request.

    `token_ids` are the new tokens, the ending one included. `logprobs` has one float per new token
    when the request asked for them, else it is empty. `finish_reason` is set on the last output of
    the request, and nothing follows it. `error` explains `FinishReason.ERROR`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counted figures of one engine step; counters are totals since the engine started."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_preemptions_total: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one engine step tells the outside, in one message."""

    outputs: tuple[TokenOutput, ...] = ()
    stats: StepStats = field(default_factory=StepStats)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine tells those who feed it, once it is ready."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int

    @property
    def max_num_tokens(self) -> int:
        """Tokens, prompt and output, that one sequence may ever hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
