"""Order of those who wait: exact cases, and random histories against a plain sorted list."""

from __future__ import annotations

from itertools import islice

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

from octavo.errors import EngineError
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policy import PriorityPolicy, make_policy
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.sequence import Sequence, SequenceStatus

picks = st.integers(0, 1000)


@pytest.fixture
def make(make_request):
    """Make a sequence by its arrival number, index and fields of its request."""

    def make(arrival, index=0, num_tokens=5, **fields):
        sequence = Sequence(make_request(f"r{arrival}", num_tokens, **fields))
        sequence.arrival_number, sequence.index = arrival, index
        return sequence

    return make


def test_an_empty_queue_has_no_head():
    queue = WaitingQueue(make_policy("fcfs"))
    assert (queue.head, len(queue), queue.num_new_tokens, list(queue)) == (None, 0, 0, [])


def test_a_preempted_sequence_returns_to_its_place_by_arrival(make):
    queue = WaitingQueue(make_policy("fcfs"))
    first, fork, second, third = make(1), make(1, 1), make(2), make(3)
    for sequence in (third, first, second, fork):
        queue.push(sequence)
    assert list(queue) == [first, fork, second, third]
    queue.remove(first)
    queue.remove(second)
    assert queue.head is fork
    queue.push(second)
    queue.push(first)
    assert list(queue) == [first, fork, second, third]


def test_sequences_of_one_request_count_as_one(make):
    queue = WaitingQueue(make_policy("fcfs"))
    first, fork, other = make(1), make(1, 1), make(2)
    first.status = fork.status = SequenceStatus.SWAPPED
    for sequence in (first, fork, other):
        queue.push(sequence)
    assert (queue.num_requests, set(queue.swapped_request_ids)) == (2, {"r1"})
    queue.remove(first)
    assert (queue.num_requests, set(queue.swapped_request_ids)) == (2, {"r1"})
    queue.remove(fork)
    assert (queue.num_requests, set(queue.swapped_request_ids)) == (1, set())


def test_the_lowest_priority_is_the_head_whatever_its_arrival(make):
    queue = WaitingQueue(make_policy("priority"))
    normal, urgent, urgent_later = make(1), make(2, priority=-1), make(3, priority=-1)
    for sequence in (normal, urgent_later, urgent):
        queue.push(sequence)
    assert list(queue) == [urgent, urgent_later, normal]
    heads = []
    while queue.head is not None:
        heads.append(queue.head)
        queue.remove(queue.head)
    assert heads == [urgent, urgent_later, normal]


def test_the_head_changes_with_service_alone(make):
    policy = make_policy("fair")
    queue = WaitingQueue(policy)
    a, b = make(1, tenant="a"), make(2, tenant="b")
    for sequence in (a, b):
        policy.arrive(sequence)
        queue.push(sequence)
    assert queue.head is a
    policy.serve(a, 3)
    assert queue.head is b
    policy.serve(b, 4)
    assert queue.head is a
    assert list(queue) == [a, b]


def test_those_never_admitted_are_counted_with_their_tokens(make):
    queue = WaitingQueue(make_policy("priority"))
    a, b = make(1, num_tokens=7), make(2, num_tokens=4, priority=3)
    queue.push(a)
    queue.push(b)
    assert (queue.num_new, queue.num_new_tokens) == (2, 11)
    queue.remove(a)
    a.append_token(9)
    a.num_preemptions = 1
    queue.push(a)
    assert (len(queue), queue.num_new, queue.num_new_tokens) == (2, 1, 4)
    assert (queue.num_returned, queue.num_tokens) == (1, 12)


def test_removal_of_one_that_does_not_wait_is_an_error(make):
    queue = WaitingQueue(make_policy("priority"))
    queue.push(make(2))
    for stranger in (make(1), make(2), make(3), make(4, priority=1)):
        with pytest.raises(EngineError, match=r"is not in the queue but must be to be removed$"):
            queue.remove(stranger)
    assert len(queue) == 1


def test_who_looks_at_the_first_few_ranks_no_others(make):
    policy = CountingPolicy()
    queue = WaitingQueue(policy)
    for arrival in range(1000):
        queue.push(make(arrival, priority=arrival))
    policy.num_ranked = 0
    assert [sequence.arrival_number for sequence in islice(queue, 3)] == [0, 1, 2]
    assert policy.num_ranked < 10


class CountingPolicy(PriorityPolicy):
    """Counts how often it was asked for a rank."""

    num_ranked = 0

    def rank(self, sequence):
        self.num_ranked += 1
        return super().rank(sequence)


class QueueMachine(RuleBasedStateMachine):
    """The model is a list of those who wait, sorted by rank when asked."""

    num_steps = 0

    @initialize(name=st.sampled_from(["fcfs", "priority", "fair"]))
    def begin(self, name):
        self.policy = make_policy(name, "0=2,1=0.5")
        self.queue = WaitingQueue(self.policy)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_arrivals = 0

    @rule(group=st.integers(0, 3), num_tokens=st.integers(1, 9), forks=st.integers(0, 2))
    def add(self, group, num_tokens, forks):
        params = SamplingParams(max_tokens=1, seed=0)
        request = Request("a", (1,) * num_tokens, params, priority=group, tenant=str(group))
        for index in range(1 + forks):
            sequence = Sequence(request)
            sequence.arrival_number, sequence.index = self.num_arrivals, index
            self.policy.arrive(sequence)
            self.queue.push(sequence)
            self.waiting.append(sequence)
        self.num_arrivals += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def admit_the_head(self):
        self.take(self.queue.head)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, lives=st.booleans())
    def take_any(self, pick, lives):
        sequence = self.waiting[pick % len(self.waiting)]
        self.take(sequence)
        if not lives:
            self.running.remove(sequence)
            self.policy.leave(sequence)

    def take(self, sequence: Sequence):
        self.queue.remove(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        with pytest.raises(EngineError):
            self.queue.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=picks, num_tokens=st.integers(1, 9), leaves=st.booleans())
    def serve(self, pick, num_tokens, leaves):
        sequence = self.running[pick % len(self.running)]
        self.policy.serve(sequence, num_tokens)
        sequence.append_token(1)
        if leaves:
            self.running.remove(sequence)
            self.policy.leave(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def preempt(self, pick):
        sequence = self.running.pop(pick % len(self.running))
        sequence.num_preemptions += 1
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        expected = sorted(self.waiting, key=self.policy.rank)
        assert list(self.queue) == expected
        assert self.queue.head is (expected[0] if expected else None)
        assert len(self.queue) == len(expected)
        new = [sequence for sequence in expected if not sequence.num_preemptions]
        assert self.queue.num_new == len(new)
        assert self.queue.num_new_tokens == sum(sequence.num_tokens for sequence in new)
        assert self.queue.num_returned == len(expected) - len(new)
        assert self.queue.num_tokens == sum(sequence.num_tokens for sequence in expected)


def test_every_random_history_is_that_of_a_sorted_list():
    QueueMachine.num_steps = 0
    run_state_machine_as_test(
        QueueMachine, settings=settings(max_examples=100, stateful_step_count=50)
    )
    assert QueueMachine.num_steps >= 3_000


def test_ranks_of_heads_that_came_and_went_are_not_kept_forever(make):
    queue = WaitingQueue(make_policy("priority"))
    queue.push(make(0, priority=-1))
    for arrival in range(1, 10_001):
        passer = make(arrival)
        queue.push(passer)
        queue.remove(passer)
    assert len(queue._heap) < 100
    assert queue.head.arrival_number == 0
