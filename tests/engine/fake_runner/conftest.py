"""An engine over a runner that answers from the token ids alone, and what it must answer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch

from octavo.adapter import AdapterArrival
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.request import TokenOutput
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts

VOCAB_SIZE = 97


def next_token(token_ids: list[int]) -> int:
    """Return what the fake model says next; never its end-of-text id, 0."""
    return 1 + (31 * token_ids[-1] + 7 * len(token_ids)) % (VOCAB_SIZE - 1)


class FakeRunner:
    """A model whose logits point at `next_token`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (0,)
    max_model_len = 64
    num_blocks = 12
    num_host_blocks = 6
    window = None
    adapters, num_adapter_slots = MappingProxyType({}), 0
    costs = PreemptionCosts(1, 1.0, math.inf, 1.0)
    num_stages = 1
    steps_ahead = 0
    computes_on_host = True

    def __init__(self) -> None:
        self._arrived: list[int] = []

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        self._arrived += [swap_in.transfer_id for swap_in in output.copies.swap_in]
        rows = [next_token(sequence.token_ids) for sequence in output.sampling]
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits[range(len(rows)), rows] = 9.0
        return logits

    def finish(self) -> None:
        """Do nothing more."""

    def wait(self) -> None:
        """Wait for no other process."""

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        return ()

    def arrived(self) -> tuple[int, ...]:
        arrived, self._arrived = tuple(self._arrived), []
        return arrived


class AheadRunner(FakeRunner):
    """A fake runner on a device that computes behind the host's back."""

    steps_ahead = 1

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[set[str]] = []
        """Whose last token each step's launch did not know yet."""

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        self.pending.append({s.request_id for s in output.sampling if s.num_pending_tokens})
        return super().execute(output, drawn)


class PipelineRunner(FakeRunner):
    """A fake runner of two stages, whose logits hold only from `finish` on."""

    num_stages = 2

    def __init__(self) -> None:
        super().__init__()
        self.started: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        assert not any(s.num_pending_tokens for s in output.sampling)
        logits = super().execute(output, drawn)
        self.started.append((torch.full_like(logits, math.nan), logits))
        return self.started[-1][0]

    def finish(self) -> None:
        promised, logits = self.started.popleft()
        promised.copy_(logits)


@pytest.fixture
def pipeline_runner() -> type[PipelineRunner]:
    return PipelineRunner


@pytest.fixture(scope="session")
def fake_runner() -> type[FakeRunner]:
    return FakeRunner


@pytest.fixture
def ahead_runner() -> type[AheadRunner]:
    return AheadRunner


@pytest.fixture
def continue_by_hand() -> Callable[[list[int], int], list[int]]:
    """Return the tokens that follow a prompt."""

    def by_hand(prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(next_token(token_ids))
        return token_ids[len(prompt) :]

    return by_hand


@pytest.fixture
def make_engine():
    """Make an engine over the fake runner: 12 blocks of 8 tokens; by default time stands still."""

    def make(
        runner: FakeRunner | None = None, clock: Callable[[], float] = lambda: 0.0, **options
    ) -> Engine:
        values = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
        return Engine(EngineConfig("fake", **values), runner or FakeRunner(), clock)

    return make


@pytest.fixture
def run():
    """Run an engine to the end, recounting after each step; return outputs by request."""

    def run_engine(engine: Engine) -> dict[str, list[TokenOutput]]:
        outputs: dict[str, list[TokenOutput]] = {}
        while engine.has_unfinished:
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
        return outputs

    return run_engine
