"""An engine without a model: every answer repeats its prompt's tokens.

The seed of a request chooses what goes wrong. Run as a program, it is a whole engine process.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from octavo.config import EngineConfig
from octavo.engine_process import main
from octavo.errors import ConfigError, EngineError, InvalidRequest, QueueFull
from octavo.inspection import InspectedPool, Inspection
from octavo.request import (
    EngineInfo,
    FinishReason,
    Request,
    SequenceTiming,
    StepOutput,
    StepStats,
    TokenLogprob,
    TokenLogprobs,
    TokenOutput,
)

MAX_MODEL_LEN = 100_000
NUM_BLOCKS = 10_000
EOS = 256

REFUSED, STEP_FAILS, DIES, ENDS_WITH_ERROR = -1, -2, -3, -4


#: What every request says of its time, but for the cached tokens.
QUEUE_S, PREFILL_S, DECODE_S = 0.001, 0.002, 0.003


@dataclass
class _Answer:
    request: Request
    index: int
    num_cached_tokens: int
    num_tokens: int = 0

    def timing(self) -> SequenceTiming:
        return SequenceTiming(
            QUEUE_S, PREFILL_S, DECODE_S * self.num_tokens, 0.0, self.num_cached_tokens
        )


@dataclass
class FakeEngine:
    """Runs two answers at a time, one block each; answer i begins with the prompt's i-th token.

    A prompt that came before with the same salt is found in its cache, but for its last token.
    """

    config: EngineConfig
    answers: list[_Answer] = field(default_factory=list)
    num_steps: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_refused: int = 0
    known_prompts: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    connections: tuple[Connection, ...] = ()
    company_s: float = 0.0

    def __post_init__(self) -> None:
        if self.config.model == "unloadable":
            raise ConfigError("the checkpoint is damaged")
        if self.config.model == "crashing":
            raise RuntimeError("out of memory")
        self.info = EngineInfo(
            max_model_len=MAX_MODEL_LEN,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            vocab_size=300,
            eos_token_ids=(EOS,),
            default_max_tokens=self.config.default_max_tokens,
            max_num_seqs=self.config.max_num_seqs,
            max_logprobs=self.config.max_logprobs,
            computes_on_host=self.config.model == "on the host",
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.answers)

    def add(self, request: Request) -> None:
        if request.params.seed == REFUSED:
            raise InvalidRequest("this engine refuses the request")
        limit = self.config.max_num_queued_requests
        if limit is not None and len(self.answers) - 2 >= limit:
            self.num_refused += 1
            raise QueueFull("too much waits")
        prompt = (request.cache_salt, request.prompt_token_ids)
        num_cached = len(request.prompt_token_ids) - 1 if prompt in self.known_prompts else 0
        self.known_prompts.add(prompt)
        self.num_query_tokens += len(request.prompt_token_ids)
        self.num_hit_tokens += num_cached
        self.answers += [_Answer(request, index, num_cached) for index in range(request.params.n)]

    def abort(
        self, request_id: str, reason: FinishReason, index: int | None
    ) -> tuple[TokenOutput, ...]:
        ended = [
            answer
            for answer in self.answers
            if answer.request.request_id == request_id and index in (None, answer.index)
        ]
        return tuple(self._end(answer, reason) for answer in ended)

    def step(self) -> StepOutput:
        time.sleep(0.002)
        self.num_steps += 1
        overdue = [
            a for a in self.answers if (a.request.deadline_s or math.inf) <= time.monotonic()
        ]
        outputs = [self._end(answer, FinishReason.DEADLINE) for answer in overdue]
        outputs += [self._advance(answer) for answer in self.answers[:2]]
        return StepOutput(tuple(outputs), self.stats())

    def stats(self) -> StepStats:
        num_running = min(2, len(self.answers))
        return StepStats(
            step=self.num_steps,
            num_running=num_running,
            num_waiting=len(self.answers) - num_running,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - num_running,
            num_prefix_query_tokens_total=self.num_query_tokens,
            num_prefix_hit_tokens_total=self.num_hit_tokens,
            num_requests_refused_total=self.num_refused,
        )

    def inspect(self) -> Inspection:
        """Show one block a request, and nothing of the requests."""
        num_used = len(self.answers)
        return Inspection(
            block_size=16,
            device=InspectedPool("u" * num_used + "." * (8 - num_used), {}, {}),
            host=InspectedPool("", {}, {}),
            sequences=(),
            num_allocated_slots=16 * num_used,
            num_used_slots=0,
            num_query_tokens=0,
            num_hit_tokens=0,
            num_swap_preemptions=0,
            num_recompute_preemptions=0,
        )

    def check_processes(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def _advance(self, answer: _Answer) -> TokenOutput:
        request, params = answer.request, answer.request.params
        if params.seed == STEP_FAILS:
            raise RuntimeError("device error")
        if params.seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if params.seed == ENDS_WITH_ERROR:
            error = EngineError("row failed")
            return self._end(answer, FinishReason.ERROR)._replace(error=error)
        prompt = request.prompt_token_ids
        token_id = prompt[(answer.num_tokens + answer.index) % len(prompt)]
        answer.num_tokens += 1
        output = TokenOutput(
            request.request_id,
            (token_id,),
            _logprobs(params.logprobs, token_id),
            index=answer.index,
        )
        if params.prompt_logprobs is not None and answer.num_tokens == 1 and not answer.index:
            scored = [_logprobs(params.prompt_logprobs, each)[0] for each in prompt[1:]]
            output = output._replace(prompt_logprobs=tuple(scored))
        reason = None
        if token_id in params.stop_token_ids:
            reason = FinishReason.STOP
        elif answer.num_tokens == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            ended = self._end(answer, reason)
            return output._replace(finish_reason=reason, timing=ended.timing)
        return output

    def _end(self, answer: _Answer, reason: FinishReason) -> TokenOutput:
        self.answers.remove(answer)
        name = answer.request.request_id
        return TokenOutput(name, (), (), reason, index=answer.index, timing=answer.timing())


def _logprobs(count: int | None, token_id: int) -> tuple[TokenLogprobs, ...]:
    """Say that a token is less likely than the `count` before it."""
    if count is None:
        return ()
    own = TokenLogprob(token_id, -0.5 * (1 + count), 1 + count)
    others = (TokenLogprob(token_id - 1 - i, -0.5 * (1 + i), 1 + i) for i in range(count))
    return ((own, *others),)


if __name__ == "__main__":
    sys.exit(main(FakeEngine))
