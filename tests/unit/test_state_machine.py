"""Random histories of the scheduler and its cache, recounted after each step.

Requests of all kinds come, draw random tokens, fork, share prefixes, are preempted both ways, come
back after any delay, run into deadlines and are aborted. The driver's memory finds any slot that is
read while it holds something else than the reader's past; the machine knows what else must hold.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import ClassVar

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

from octavo.errors import InvalidRequest, PromptTooLong, QueueFull
from octavo.request import FinishReason
from octavo.scheduler.output import SchedulerOutput
from octavo.sequence import Sequence, SequenceStatus

EOS = 0
#: Prompts are cut from these, so that many begin alike.
TEXTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5])
WAITING, SWAPPED = SequenceStatus.WAITING, SequenceStatus.SWAPPED
RUNNING, RESTORING = SequenceStatus.RUNNING, SequenceStatus.RESTORING
picks = st.integers(0, 1000)


class SchedulerMachine(RuleBasedStateMachine):
    """The model is who has come, and how often each answer has ended."""

    policy = "fcfs"
    steps_ahead = 0
    num_stages = 1
    make_driver = None
    num_steps = 0
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        shape=st.tuples(st.integers(1, 16), st.sampled_from([1, 2, 4]), st.integers(0, 10)),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        max_model_len=st.integers(2, 40),
        max_num_queued_requests=st.sampled_from([None, None, 2]),
        prefix_caching=st.booleans(),
        window=st.sampled_from([None, None, 3]),
        swap_period=st.integers(1, 3),
    )
    def begin(
        self, shape, max_num_seqs, spare_budget, prefix_caching, window, swap_period, **limits
    ):
        num_blocks, block_size, num_host_blocks = shape
        self.driver = type(self).make_driver(
            num_blocks,
            self.policy,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching,
            window=window,
            swap_pays=lambda num_blocks, num_tokens: num_tokens % swap_period == 0,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            num_stages=self.num_stages,
            **limits,
        )
        self.max_under_way = self.driver.steps_ahead = self.steps_ahead or self.num_stages - 1
        self.scheduler = self.driver.scheduler
        self.caches = prefix_caching
        self.room = min(limits["max_model_len"], num_blocks * block_size)
        self.arrivals: list[Sequence] = []
        self.ends: Counter[tuple[str, int]] = Counter()

    @rule(
        text=st.sampled_from(TEXTS),
        num_tokens=st.integers(0, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        patience_s=st.sampled_from([None, None, 3, 10]),
        salt=st.sampled_from(["", "", "x"]),
        rank=st.integers(0, 2),
    )
    def add(self, text, num_tokens, n, max_tokens, patience_s, salt, rank):
        options = {
            "n": n,
            "max_tokens": max_tokens,
            "deadline_s": None if patience_s is None else self.driver.now_s + patience_s,
            "cache_salt": salt,
            "priority": rank,
            "tenant": str(rank),
        }
        name = str(len(self.arrivals))
        try:
            sequence = self.driver.add(name, text[:num_tokens], **options)
        except InvalidRequest:
            assert num_tokens == 0 or n > self.scheduler.limits.max_num_seqs
        except PromptTooLong:
            assert num_tokens + 1 > self.room or n > 1
        except QueueFull:
            assert len(self.scheduler.waiting) >= 2
        else:
            self.arrivals.append(sequence)
            with pytest.raises(InvalidRequest):
                self.driver.add(name)

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(
        drawn=st.lists(st.integers(0, 8), min_size=1, max_size=4), seconds=st.sampled_from([0, 1])
    )
    def step(self, drawn, seconds):
        driver = self.driver
        driver.now_s += seconds
        before = {sequence: list(sequence.token_ids) for sequence in self.live}
        output = driver.plan()
        self.check_plan(output)
        self.check_preempted(output, before)
        driver.launch(output, *(drawn[row % len(drawn)] for row in range(len(output.sampling))))
        while len(driver.under_way) > (self.max_under_way if output.scheduled else 0):
            self.land()

    def land(self):
        output, rows = self.driver.under_way[0]
        pairs = zip(output.sampling, rows, strict=True)
        drawn = [(s, token_id) for s, token_id in pairs if s.status is not SequenceStatus.FINISHED]
        before = {sequence: self.named(sequence) for sequence, _ in drawn}
        self.check_results(output, drawn, before, self.driver.land())

    @staticmethod
    def named(sequence: Sequence) -> list[int]:
        return sequence.token_ids[: sequence.num_named_tokens]

    @staticmethod
    def can_compute(sequence: Sequence) -> bool:
        """Its last token, when it is under way, is never computed."""
        most = min(sequence.num_tokens, sequence.max_num_tokens - 1)
        return sequence.num_computed_tokens < most

    def check_plan(self, output: SchedulerOutput):
        items, limits = output.scheduled, self.scheduler.limits
        planned = [item.sequence for item in items]
        assert planned == [s for s in self.scheduler.running if s in planned]
        assert output.num_scheduled_tokens <= limits.max_num_batched_tokens
        for sequence, count, draws in items:
            assert count >= 1
            end = sequence.num_computed_tokens + count
            assert bool(draws) is (end == sequence.num_tokens)
            assert end <= len(sequence.block_table) * self.scheduler.cache.block_size
            assert sequence.request.deadline_s is None or (
                sequence.request.deadline_s > self.driver.now_s
            )
        if not self.scheduler.restoring:
            assert planned or not self.live or self.driver.under_way, "somebody must advance"
            able = list(filter(self.can_compute, self.scheduler.running))
            assert planned == able[: len(planned)] or self.num_stages > 1
            if output.num_scheduled_tokens < limits.max_num_batched_tokens:
                self.check_nobody_idles_for_nothing(output)

    def check_nobody_idles_for_nothing(self, output: SchedulerOutput):
        scheduler = self.scheduler
        if len(output.scheduled) < sum(map(self.can_compute, scheduler.running)):
            assert self.num_stages > 1, "nobody else computes the others"
            assert len(output.scheduled) * self.num_stages >= len(scheduler.running)
        head = scheduler.waiting.head
        is_known = head is not None and not head.num_steps_under_way
        if is_known and not output.preempted and not self.caches:
            assert not scheduler.admission.fits(head, scheduler.cache.find_cached(head))

    def check_preempted(self, output: SchedulerOutput, before: dict[Sequence, list[int]]):
        for sequence in output.preempted:
            assert sequence.token_ids == before[sequence]
            if sequence.status in (WAITING, SWAPPED):
                type(self).happened[sequence.status.value] += 1
            else:
                assert self.caches, "only who finds its KV in the cache may come back at once"
            for item in output.scheduled:
                if self.policy != "fair" and item.sequence is not sequence:
                    assert self.rank(item.sequence) < self.rank(sequence)

    def check_results(self, output, drawn, before, results):
        num_ended = len(output.ended)
        for result in results[:num_ended]:
            assert result.finish_reason is FinishReason.DEADLINE
            self.ends[result.request_id, result.index] += 1
        for (sequence, token_id), result in zip(drawn, results[num_ended:], strict=True):
            assert (result.request_id, result.index) == (sequence.request_id, sequence.index)
            assert result.token_ids == (token_id,)
            assert self.named(sequence) == [*before[sequence], token_id]
            assert result.finish_reason is sequence.finish_reason is self.expect(sequence)
            self.ends[result.request_id, result.index] += result.finish_reason is not None
        type(self).happened["forks"] += sum(fork.index > 0 for fork in output.sampling)
        type(self).happened["copies"] += len(output.copies.copies)
        type(self).happened["restored"] += len(output.copies.swap_in)

    def expect(self, sequence: Sequence) -> FinishReason | None:
        named = self.named(sequence)
        if named[-1] == EOS:
            return FinishReason.STOP
        num_outputs = len(named) - sequence.num_prompt_tokens
        if num_outputs == sequence.params.max_tokens or len(named) == self.room:
            return FinishReason.LENGTH
        return None

    @precondition(lambda self: self.scheduler.restoring)
    @rule(pick=picks)
    def arrive(self, pick):
        transfer_ids = list(self.scheduler.restoring)
        self.driver.arrive(transfer_ids[pick % len(transfer_ids)])

    @precondition(lambda self: self.arrivals)
    @rule(pick=picks, index=st.sampled_from([None, None, 0, 1]))
    def abort(self, pick, index):
        name = self.arrivals[pick % len(self.arrivals)].request_id
        expected = [
            s for s in self.live if s.request_id == name and (index is None or s.index == index)
        ]
        ended = self.scheduler.finish(name, FinishReason.ABORT, index)
        assert set(ended) == set(expected)
        for sequence in ended:
            for each in range(sequence.index, sequence.index + sequence.num_seats):
                self.ends[name, each] += 1

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=picks)
    def preempt(self, pick):
        sequence = self.scheduler.running[pick % len(self.scheduler.running)]
        assert self.scheduler.preempt(sequence, self.driver.now_s) is sequence
        type(self).happened[sequence.status.value] += 1

    @property
    def live(self) -> list[Sequence]:
        return list(self.scheduler.sequences())

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return self.scheduler.policy.rank(sequence)

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        scheduler = self.scheduler
        scheduler.check_integrity()
        first = {s.request_id for s in self.arrivals if s.status is not SequenceStatus.FINISHED}
        assert first <= {s.request_id for s in self.live}
        assert all(s.status is RUNNING for s in scheduler.running)
        for sequence in scheduler.waiting:
            assert sequence.status in (WAITING, SWAPPED)
            assert sequence.block_table == []
            assert (sequence.num_computed_tokens > 0) is (sequence.status is SWAPPED)
        for sequence in scheduler.running:
            # A token that a pipeline draws counts only when it is drawn.
            is_in_pipeline = self.num_stages > 1 and sequence.num_steps_under_way > 0
            num_tokens = sequence.num_tokens + is_in_pipeline
            assert 0 <= sequence.num_computed_tokens < num_tokens <= self.room + is_in_pipeline
            assert sequence.num_pending_tokens <= sequence.num_steps_under_way <= self.max_under_way
        orders = [scheduler.waiting]
        if self.policy != "fair":
            orders.append(scheduler.running)
        for order in orders:
            assert all(self.rank(a) < self.rank(b) for a, b in pairwise(order))

    def teardown(self):
        """Let everything end by itself: boundedly, once each, and with all blocks free."""
        limit = 4 * sum((s.num_tokens + s.params.max_tokens) * s.num_seats for s in self.live) + 9
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step([3], 0)
            if self.scheduler.restoring:
                self.driver.arrive()
            self.recount()
        assert not self.scheduler.has_unfinished
        while self.driver.under_way:  # which may still have to tell of a deadline
            self.land()
        expected = ((s.request_id, index) for s in self.arrivals for index in range(s.params.n))
        assert +self.ends == Counter(expected)
        cache = self.scheduler.cache
        assert (cache.num_free_blocks, cache.num_used_host_blocks) == (cache.num_blocks, 0)
        type(self).happened["hit tokens"] += cache.num_hit_tokens


@pytest.mark.parametrize(
    ("policy", "steps_ahead", "num_stages"),
    [
        *[(policy, ahead, 1) for ahead in (0, 1) for policy in ("fcfs", "priority", "fair")],
        ("fcfs", 0, 2),
        ("priority", 0, 4),
    ],
)
def test_every_random_history_keeps_the_promises(policy, steps_ahead, num_stages, make_scheduler):
    class Machine(SchedulerMachine):
        make_driver = staticmethod(make_scheduler)
        num_steps = 0
        happened: ClassVar[Counter[str]] = Counter()

    Machine.policy, Machine.steps_ahead, Machine.num_stages = policy, steps_ahead, num_stages
    run_state_machine_as_test(Machine, settings=settings(max_examples=100, stateful_step_count=50))
    assert Machine.num_steps >= 2_000
    kinds = ("waiting", "swapped", "restored", "forks", "copies", "hit tokens")
    assert all(Machine.happened[kind] > 2 for kind in kinds), Machine.happened
