"""Random histories of the pool, the manager and the scheduler, recounted after each step.

Each machine keeps a plain model of what must hold. Ten thousand steps in all.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.cache.block_pool import BlockPool
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError, InvalidRequest, PromptTooLong
from octavo.request import FinishReason, Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits
from octavo.sequence import Sequence, SequenceStatus

EOS = 0
picks = st.integers(0, 1000)
token_ids = st.lists(st.integers(0, 8), min_size=1, max_size=4)


class PoolMachine(RuleBasedStateMachine):
    """The model is two lists: free blocks in the order they go out, and taken ones."""

    num_steps = 0

    @initialize(num_blocks=st.integers(1, 12))
    def begin(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = deque(range(num_blocks))
        self.taken: list[int] = []

    @rule(count=st.integers(0, 13))
    def take(self, count):
        blocks = self.pool.take(count)
        if count > len(self.free):
            assert blocks is None
        else:
            assert blocks == [self.free.popleft() for _ in range(count)]
            self.taken += blocks

    @precondition(lambda self: self.taken)
    @rule(count=st.integers(1, 12), pick=picks)
    def free_some(self, count, pick):
        start = pick % len(self.taken)
        blocks = self.taken[start : start + count][::-1]
        del self.taken[start : start + count]
        self.pool.free(blocks)
        self.free.extend(blocks)

    @precondition(lambda self: self.free)
    @rule(pick=picks)
    def free_a_free_block(self, pick):
        with pytest.raises(EngineError):
            self.pool.free([self.free[pick % len(self.free)]])

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        assert self.pool.num_free == len(self.free)
        self.pool.check_integrity(self.taken)


class ManagerMachine(RuleBasedStateMachine):
    """The model is how many tokens each sequence has room for."""

    num_steps = 0

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 4, 16]))
    def begin(self, num_blocks, block_size):
        self.manager = KVCacheManager(num_blocks, block_size)
        request = Request("a", (1,), SamplingParams(max_tokens=1, seed=0))
        self.sequences = [Sequence(request) for _ in range(4)]
        self.num_tokens = [0] * 4

    @rule(index=st.integers(0, 3), num_tokens=st.integers(1, 100))
    def allocate(self, index, num_tokens):
        sequence = self.sequences[index]
        before = list(sequence.block_table)
        has_room = self.manager.has_room(sequence, num_tokens)
        assert self.manager.allocate(sequence, num_tokens) is has_room
        if has_room:
            self.num_tokens[index] = max(self.num_tokens[index], num_tokens)
        else:
            assert sequence.block_table == before
        assert sequence.block_table[: len(before)] == before

    @rule(index=st.integers(0, 3))
    def free(self, index):
        self.manager.free(self.sequences[index])
        self.num_tokens[index] = 0

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        size = self.manager.block_size
        needed = [-(-count // size) for count in self.num_tokens]
        assert [len(sequence.block_table) for sequence in self.sequences] == needed
        assert self.manager.num_free_blocks == self.manager.num_blocks - sum(needed)
        self.manager.check_integrity(self.sequences)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, draw random tokens, are aborted and preempted; each ends exactly once."""

    num_steps = 0

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        max_model_len=st.integers(2, 40),
    )
    def begin(self, num_blocks, block_size, max_num_seqs, spare_budget, max_model_len):
        limits = SchedulerLimits(max_num_seqs, max_num_seqs + spare_budget, max_model_len)
        self.scheduler = Scheduler(limits, KVCacheManager(num_blocks, block_size), (EOS,))
        self.room = min(max_model_len, num_blocks * block_size)
        self.arrivals: list[Sequence] = []
        self.ends: Counter[str] = Counter()

    @rule(
        prompt=st.integers(0, 20),
        max_tokens=st.integers(1, 12),
        stops=st.sampled_from([(), (1,), (1, 2)]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt, max_tokens, stops, ignore_eos):
        params = SamplingParams(
            max_tokens=max_tokens, seed=0, stop_token_ids=stops, ignore_eos=ignore_eos
        )
        sequence = Sequence(Request(str(len(self.arrivals)), tuple(range(prompt)), params))
        if prompt == 0 or prompt + 1 > self.room:
            with pytest.raises(PromptTooLong if prompt else InvalidRequest):
                self.scheduler.add(sequence)
        else:
            self.scheduler.add(sequence)
            self.arrivals.append(sequence)
            with pytest.raises(InvalidRequest):
                self.scheduler.add(sequence)

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(drawn=token_ids)
    def step(self, drawn):
        oldest = self.live[0]
        before = {sequence: list(sequence.token_ids) for sequence in self.live}
        num_preemptions = self.scheduler.num_preemptions
        output = self.scheduler.schedule()
        assert output.scheduled[0].sequence is oldest
        self.check_plan(output)
        self.check_preempted(output, before)
        assert self.scheduler.num_preemptions == num_preemptions + len(output.preempted)
        rows = [drawn[row % len(drawn)] for row in range(len(output.sampling))]
        results = self.scheduler.update(output, tuple(map(SampledToken, rows)))
        self.check_results(output, rows, results, before)

    def check_plan(self, output: SchedulerOutput):
        items = output.scheduled
        limits = self.scheduler.limits
        assert len(items) <= len(self.scheduler.running) <= limits.max_num_seqs
        assert output.num_scheduled_tokens <= limits.max_num_batched_tokens
        assert [item.sequence for item in items] == self.scheduler.running[: len(items)]
        assert all(item.samples for item in items[:-1])
        for item in items:
            assert item.num_scheduled_tokens >= 1
            end = item.sequence.num_computed_tokens + item.num_scheduled_tokens
            assert item.samples is (end == item.sequence.num_tokens)
            assert end <= len(item.sequence.block_table) * self.scheduler.cache.block_size
        if output.num_scheduled_tokens < limits.max_num_batched_tokens:
            self.check_nobody_idles_for_nothing(output)

    def check_nobody_idles_for_nothing(self, output: SchedulerOutput):
        scheduler = self.scheduler
        assert len(output.scheduled) == len(scheduler.running)
        if scheduler.waiting and not output.preempted:
            head = scheduler.waiting[0]
            is_full = len(scheduler.running) == scheduler.limits.max_num_seqs
            assert is_full or not scheduler.cache.has_room(head, head.num_tokens + 1)

    def check_preempted(self, output: SchedulerOutput, before: dict[Sequence, list[int]]):
        queue = list(self.scheduler.waiting)[: len(output.preempted)]
        assert queue == list(output.preempted)[::-1]
        for sequence in output.preempted:
            assert sequence.token_ids == before[sequence]
            assert (sequence.num_computed_tokens, sequence.block_table) == (0, [])

    def check_results(self, output, rows, results, before):
        for sequence, token_id, result in zip(output.sampling, rows, results, strict=True):
            assert (result.request_id, result.token_ids) == (sequence.request_id, (token_id,))
            assert sequence.token_ids == [*before[sequence], token_id]
            assert result.finish_reason is sequence.finish_reason is self.expect(sequence)
            if result.finish_reason is not None:
                self.ends[result.request_id] += 1
        assert sum(map(len, before.values())) + len(rows) == sum(
            sequence.num_tokens for sequence in before
        )

    def expect(self, sequence: Sequence) -> FinishReason | None:
        params = sequence.params
        last = sequence.token_ids[-1]
        if last in params.stop_token_ids or (last == EOS and not params.ignore_eos):
            return FinishReason.STOP
        if sequence.num_output_tokens == params.max_tokens or sequence.num_tokens == self.room:
            return FinishReason.LENGTH
        return None

    @precondition(lambda self: self.arrivals)
    @rule(pick=picks)
    def abort(self, pick):
        sequence = self.arrivals[pick % len(self.arrivals)]
        was_live = sequence.status is not SequenceStatus.FINISHED
        ended = self.scheduler.finish(sequence.request_id, FinishReason.ABORT)
        assert ended is (sequence if was_live else None)
        assert sequence.block_table == []
        self.ends[sequence.request_id] += was_live

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt(self):
        sequence = self.scheduler.running[-1]
        assert self.scheduler.preempt(sequence) is sequence
        assert self.scheduler.waiting[0] is sequence

    @property
    def live(self) -> list[Sequence]:
        return list(self.scheduler.sequences())

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        self.scheduler.check_integrity()
        unfinished = [s for s in self.arrivals if s.status is not SequenceStatus.FINISHED]
        assert self.live == unfinished
        assert self.scheduler.has_unfinished is bool(unfinished)
        assert all(s.status is SequenceStatus.RUNNING for s in self.scheduler.running)
        for sequence in self.scheduler.waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert (sequence.num_computed_tokens, sequence.block_table) == (0, [])
        for sequence in self.scheduler.running:
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= self.room

    def teardown(self):
        """Let everything end by itself: boundedly, once each, and with all blocks free."""
        limit = 2 * sum(s.num_tokens + s.params.max_tokens for s in self.live)
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step([3])
            self.recount()
        assert not self.scheduler.has_unfinished
        assert self.ends == Counter(s.request_id for s in self.arrivals)
        cache = self.scheduler.cache
        assert cache.num_free_blocks == cache.num_blocks


@pytest.mark.parametrize(
    ("machine", "num_examples", "min_steps"),
    [(PoolMachine, 50, 1_500), (ManagerMachine, 50, 1_500), (SchedulerMachine, 250, 10_000)],
)
def test_every_random_history_keeps_the_promises(machine, num_examples, min_steps):
    machine.num_steps = 0
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_examples, stateful_step_count=50)
    )
    assert machine.num_steps >= min_steps
