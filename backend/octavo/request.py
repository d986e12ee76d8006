"""What crosses between threads and processes: a request on its way in, tokens on their way out.

Everything here is frozen, small and picklable. Knows nothing of text, tensors or scheduling.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.errors import InvalidRequest, OctavoError
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

    Times are of the machine's monotonic clock, which all its processes share. `params.max_tokens`
    and `params.seed` (unless beams are searched) are always set here (`SamplingParams.resolve`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0
    deadline_s: float | None = None
    """The request ends at this time, whatever it has produced."""
    priority: int = 0
    """Lower runs first, where the scheduling policy heeds it."""
    tenant: str = ""
    """Who the request is for, where the scheduling policy shares fairly."""
    cache_salt: str = ""
    """Only requests of the same salt reuse each other's cached prefixes."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as the tokenizer spells them: the last of each never follows the rest."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a request that names a token that the model does not have.

        Raises:
            InvalidRequest: says where, which and what is allowed.
        """
        self.params.check_vocabulary(vocab_size)
        for token_id in self.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"the prompt holds token id {token_id} but ids must be in [0, {vocab_size - 1}]"
                )

    encodes_prompt: bool = False
    """Whether an encoder reads the prompt; else the answer goes on from it."""

    @property
    def continued_token_ids(self) -> tuple[int, ...]:
        """What stands before the answer: the prompt, or nothing where an encoder reads it."""
        return () if self.encodes_prompt else self.prompt_token_ids


@dataclass(frozen=True, slots=True)
class SequenceTiming:
    """Where the time of one sequence went, and what it was spared; the parts add up to its life."""

    queue_s: float = 0.0
    """From arrival until it was first scheduled."""
    prefill_s: float = 0.0
    """Running, before its first token."""
    decode_s: float = 0.0
    """Running, after its first token."""
    preempted_s: float = 0.0
    """Waiting after a preemption, or for KV blocks to come back from the host."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache."""
    num_preemptions: int = 0


class TokenLogprob(NamedTuple):
    """How likely a token is by the model's own distribution, before all that is done to it."""

    token_id: int
    logprob: float
    rank: int
    """1 + the number of tokens that are more likely."""


TokenLogprobs = tuple[TokenLogprob, ...]
"""What stands at one place, then those of the most likely that do not, the likeliest first."""


class TokenOutput(NamedTuple):
    """What one step produced for one sequence of a request.

    `token_ids` are the new tokens, the ending one included. `logprobs` has an element per new token
    when the request asked for them, else it is empty. `prompt_logprobs` has one per prompt token
    that the step has read, in order, without the first of the prompt; outputs with them come of the
    first sequence only, before any with tokens. `finish_reason` is set on the last output of
    the sequence, and nothing follows it; `timing` comes with it. `error` explains
    `FinishReason.ERROR`, which ends all sequences of the request. `index` tells the n sequences of
    a request apart. One is made for each token, and a named tuple is made and pickled much faster
    than a frozen dataclass.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: OctavoError | None = None
    index: int = 0  # type: ignore[assignment]  # it hides a tuple's method that nobody needs
    timing: SequenceTiming | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counted figures of one engine step; counters are totals since the engine started."""

    step: int = 0
    num_running: int = 0
    """Requests of which a sequence runs."""
    num_waiting: int = 0
    """Requests of which a sequence is in the queue."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_scheduled_tokens: int = 0
    num_context: int = 0
    """Sequences of which the step computed tokens of the prompt."""
    step_s: float = 0.0
    """Time that the step took; where steps overlap, until the one before it had landed."""
    num_computed_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_preemptions_total: int = 0
    """Those by swap and those by recomputation."""
    num_swapped: int = 0
    """Requests of which a sequence has its KV in host memory or on its way back."""
    num_cached_blocks: int = 0
    """Free blocks whose content may still be reused."""
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    """Host blocks that swapped sequences own."""
    num_cached_host_blocks: int = 0
    """Other host blocks whose content may still be reused."""
    num_swap_preemptions_total: int = 0
    num_prefix_query_tokens_total: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    num_prefix_hit_tokens_total: int = 0
    """Prompt tokens that were found there, on the device or the host."""
    num_requests_refused_total: int = 0
    """Requests refused because `max_num_queued_requests` waited already."""
    num_tokens_refused_total: int = 0
    """Requests refused because `max_num_queued_tokens` tokens waited already."""
    num_resident_adapters: int = 0
    """Adapters in memory."""
    num_adapter_loads_total: int = 0
    """Adapters that were read because a request wanted them, since the start."""
    num_failed_adapter_loads_total: int = 0
    """Those that could not be."""
    adapter_wait_s_total: float = 0.0
    """Seconds that requests waited for their adapters, of all together."""


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
    max_num_seqs: int
    num_host_blocks: int = 0
    max_logprobs: int = 20
    computes_on_host: bool = False
    """Whether it computes on the cores of the host, from which all else that runs there takes."""
    adapters: tuple[str, ...] = ()
    """Names that `lora_name` may have."""

    encodes_prompt: bool = False
    """Whether an encoder reads the prompt, which then takes no room of the answer's."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens, prompt and output, that one sequence may ever hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have."""
        return self.max_num_tokens - (not self.encodes_prompt)

    def room_behind(self, num_prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt of so many."""
        # A decoder of its own begins with a token that is no part of the answer.
        return self.max_num_tokens - (1 if self.encodes_prompt else num_prompt_tokens)
