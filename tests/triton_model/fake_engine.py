"""An engine without a model: every answer repeats its prompt's tokens.

The seed of a request chooses what goes wrong. Run as a program, it is a whole engine process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.engine_process import main
from octavo.errors import ConfigError, InvalidRequest
from octavo.inspection import InspectedPool, Inspection
from octavo.request import EngineInfo, FinishReason, Request, StepOutput, StepStats, TokenOutput

MAX_MODEL_LEN = 100_000
NUM_BLOCKS = 10_000
EOS = 256

REFUSED, STEP_FAILS, DIES, ENDS_WITH_ERROR = -1, -2, -3, -4


@dataclass
class _Answer:
    request: Request
    num_tokens: int = 0


@dataclass
class FakeEngine:
    """Runs two requests at a time, one block each."""

    config: EngineConfig
    answers: dict[str, _Answer] = field(default_factory=dict)
    num_steps: int = 0

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
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.answers)

    def add(self, request: Request) -> None:
        if request.params.seed == REFUSED:
            raise InvalidRequest("this engine refuses the request")
        self.answers[request.request_id] = _Answer(request)

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        return self.answers.pop(request_id, None) is not None

    def step(self) -> StepOutput:
        time.sleep(0.002)
        self.num_steps += 1
        running = list(self.answers.values())[:2]
        outputs = tuple(self._advance(answer) for answer in running)
        return StepOutput(outputs, self.stats())

    def stats(self) -> StepStats:
        num_running = min(2, len(self.answers))
        return StepStats(
            step=self.num_steps,
            num_running=num_running,
            num_waiting=len(self.answers) - num_running,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - num_running,
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

    def check_integrity(self) -> None:
        pass

    def _advance(self, answer: _Answer) -> TokenOutput:
        request, params = answer.request, answer.request.params
        if params.seed == STEP_FAILS:
            raise RuntimeError("device error")
        if params.seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if params.seed == ENDS_WITH_ERROR:
            del self.answers[request.request_id]
            return TokenOutput(
                request.request_id, finish_reason=FinishReason.ERROR, error="row failed"
            )
        token_id = request.prompt_token_ids[answer.num_tokens % len(request.prompt_token_ids)]
        answer.num_tokens += 1
        reason = None
        if token_id in params.stop_token_ids:
            reason = FinishReason.STOP
        elif answer.num_tokens == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.answers[request.request_id]
        return TokenOutput(request.request_id, (token_id,), (), reason)


if __name__ == "__main__":
    sys.exit(main(FakeEngine))
