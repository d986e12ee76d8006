"""Makers of sequences and schedulers with small, readable numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import TokenOutput
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits
from octavo.sequence import Sequence

EOS = 0


@pytest.fixture(scope="session")
def make_sequence(make_request) -> Callable[..., Sequence]:
    """Make a waiting sequence; arguments as for `make_request`."""
    return lambda *args, **params: Sequence(make_request(*args, **params))


class SchedulerDriver:
    """A scheduler whose steps read as plain data; every step recounts the blocks."""

    def __init__(self, scheduler: Scheduler, make_sequence: Callable[..., Sequence]) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.outputs: list[TokenOutput] = []
        self.preempted: list[str] = []
        self._make_sequence = make_sequence

    def add(self, name: str, prompt: int = 5, **params) -> Sequence:
        sequence = self._make_sequence(name, prompt, **params)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.preempted = [sequence.request_id for sequence in output.preempted]
        return output

    def run(self, output: SchedulerOutput, *token_ids: int) -> list[tuple[str, int, bool]]:
        """Finish a planned step; rows draw `token_ids`, then 9.

        Returns (name, tokens, whether it drew) of each sequence in the step.
        """
        drawn = [*token_ids, *[9] * len(output.sampling)][: len(output.sampling)]
        self.outputs = self.scheduler.update(output, tuple(map(SampledToken, drawn)))
        self.scheduler.check_integrity()
        return [
            (item.sequence.request_id, item.num_scheduled_tokens, item.samples)
            for item in output.scheduled
        ]

    def step(self, *token_ids: int) -> list[tuple[str, int, bool]]:
        return self.run(self.plan(), *token_ids)

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


@pytest.fixture(scope="session")
def make_scheduler(make_sequence) -> Callable[..., SchedulerDriver]:
    """Make a driven scheduler over blocks of 4 tokens, whose end-of-text id is 0."""

    def make(
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 400,
        block_size: int = 4,
    ) -> SchedulerDriver:
        limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len)
        cache = KVCacheManager(num_blocks, block_size)
        return SchedulerDriver(Scheduler(limits, cache, (EOS,)), make_sequence)

    return make
