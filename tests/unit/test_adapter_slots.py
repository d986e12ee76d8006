"""Who has a slot for its adapter: exact cases, and random histories in which all are served."""

from __future__ import annotations

from collections import Counter
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

from octavo.adapter import Adapter, AdapterArrival, AdapterLoad
from octavo.errors import EngineError, QueueFull
from octavo.request import FinishReason
from octavo.scheduler.output import SchedulerOutput
from octavo.sequence import Sequence, SequenceStatus

A, B, C, D = (Adapter(number, bytes([number])) for number in range(4))


class Adapters:
    """A driven scheduler whose requests have adapters, which come when they are told to."""

    def __init__(self, driver, make_sequence) -> None:
        self.driver, self.scheduler = driver, driver.scheduler
        self.coming: list[AdapterLoad] = []
        self._make_sequence = make_sequence

    def add(self, name: str, adapter: Adapter | None, prompt=3, **params) -> Sequence:
        sequence = self._make_sequence(name, prompt, **{"max_tokens": 3, **params})
        sequence.adapter = adapter
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[str]:
        """Plan a step and run it; return who is in it."""
        output = self.driver.plan()
        self.coming += output.loads
        return [name for name, _, _ in self.driver.run(output)]

    def come(self, error: EngineError | None = None):
        """Let the adapter come that was asked for first, or fail."""
        load = self.coming.pop(0)
        arrival = AdapterArrival(load.number, error)
        return self.scheduler.adapters.arrive([arrival], self.driver.now_s)

    def steps_until(self, name: str) -> int:
        """Step until somebody is in a step, all adapters coming at once; return how often."""
        for count in range(100):
            if name in self.step():
                return count
            while self.coming:
                self.come()
        raise AssertionError(f"{name} is never in a step")


@pytest.fixture
def make(make_scheduler, make_sequence):
    """Make a scheduler of so many slots, whose policy and limits are as `make_scheduler` has."""

    def build(num_slots: int, policy: str = "fcfs", **limits) -> Adapters:
        driver = make_scheduler(policy=policy, num_adapter_slots=num_slots, **limits)
        return Adapters(driver, make_sequence)

    return build


def test_a_cold_adapter_is_waited_for_while_all_others_go_on(make):
    it = make(2)
    it.add("cold", C)
    for name, adapter in {"a": A, "plain": None}.items():
        it.add(name, adapter)
    assert it.step() == ["a", "plain"]
    assert it.coming == [AdapterLoad(C.number, slot=1)]  # b is idle, and a was not
    it.add("b", B)
    assert it.step() == ["a", "plain"]
    assert it.come() == []
    assert it.step() == ["cold", "a", "plain"]


def test_an_idle_adapter_makes_room_the_least_recently_admitted_first(make):
    it = make(3)
    for name, adapter in {"a": A, "c": C, "b": B}.items():
        it.add(name, adapter, max_tokens=1)
        assert it.step() == [name]
    it.add("d", D)
    assert it.step() == []
    assert it.coming == [AdapterLoad(D.number, slot=A.number)]


def test_an_adapter_in_use_stays_until_all_who_were_admitted_with_it_have_ended(make):
    it = make(1)
    it.add("a", A, max_tokens=4)
    it.step()
    it.add("cold", B)
    it.add("late", A)
    assert [it.step() for _ in range(3)] == [["a"]] * 3
    assert it.coming == []
    assert it.step() == []
    assert it.coming == [AdapterLoad(B.number, slot=0)]
    it.come()
    assert it.step() == ["cold"]
    assert it.steps_until("late") == 3


def test_who_waits_further_ahead_with_an_adapter_keeps_it(make):
    it = make(1, max_num_seqs=1)
    for name, adapter in {"a": A, "next": A, "cold": B, "last": A}.items():
        it.add(name, adapter)
    assert [it.step() for _ in range(3)] == [["a"]] * 3
    assert it.step() == ["next"]
    assert it.steps_until("cold") == 3
    assert it.steps_until("last") == 3


def test_steady_traffic_of_the_others_keeps_nobody_waiting(make):
    it = make(2)
    for index in range(4):
        it.add(f"hot {index}", (A, B)[index % 2], max_tokens=5)
        it.step()
    it.add("cold", C)
    served = []
    for index in range(4, 40):
        it.add(f"hot {index}", (A, B)[index % 2], max_tokens=5)
        served += it.step()
        while it.coming:
            it.come()
        if "cold" in served:
            break
    assert index < 12
    assert it.steps_until(f"hot {index}") < 12


def test_a_victim_is_open_again_when_nobody_wants_its_slot_any_more(make):
    it = make(1)
    it.add("a", A, max_tokens=9)
    it.step()
    it.add("cold", B)
    it.add("late", A)
    assert it.step() == ["a"]
    (ended,) = it.scheduler.finish("cold", FinishReason.ABORT)
    assert ended.status is SequenceStatus.FINISHED
    assert it.step() == ["a", "late"]
    assert it.coming == []


def test_who_gives_up_while_its_adapter_comes_leaves_it_to_the_next(make):
    it = make(1)
    it.add("cold", B)
    it.add("late", B, deadline_s=5.0)
    it.step()
    it.scheduler.finish("cold", FinishReason.ABORT)
    it.driver.now_s = 6.0
    output = it.driver.plan()
    assert [(each.request_id, each.finish_reason) for each in output.ended] == [
        ("late", FinishReason.DEADLINE)
    ]
    it.driver.run(output)
    assert not it.scheduler.has_unfinished
    it.come()
    it.add("b", B)
    assert it.step() == ["b"]


def test_a_load_that_fails_ends_those_who_want_the_adapter_and_is_tried_again(make):
    it = make(1)
    it.add("x", B)
    it.add("y", B)
    it.add("plain", None)
    it.step()
    error = EngineError("gone")
    outputs = it.come(error)
    assert [(each.request_id, each.finish_reason, each.error) for each in outputs] == [
        (name, FinishReason.ERROR, error) for name in ("x", "y")
    ]
    assert it.step() == ["plain"]
    it.add("z", B)
    assert it.steps_until("z") == 1
    adapters = it.scheduler.adapters
    assert (adapters.num_loads, adapters.num_failed_loads, adapters.num_resident) == (1, 1, 1)


def test_a_preempted_sequence_keeps_its_adapter(make):
    it = make(1)
    first = it.add("a", A, max_tokens=6)
    it.step()
    it.add("cold", B)
    it.scheduler.preempt(first, 0.0)
    assert it.step() == ["a"]
    assert it.coming == []


def test_urgent_requests_get_their_adapters_first(make):
    it = make(1, "priority")
    it.add("late", B, priority=5)
    it.add("urgent", C, priority=1)
    it.step()
    assert it.coming == [AdapterLoad(C.number, slot=0)]


def test_who_is_held_counts_as_waiting_and_turns_nobody_else_away(make):
    it = make(1, max_num_queued_requests=1)
    it.add("a", A)
    it.step()
    it.add("cold", B)
    it.step()
    it.add("plain", None)
    with pytest.raises(QueueFull, match="1 request waits"):
        it.add("more", B)
    assert it.step() == ["a", "plain"]


def test_seconds_are_counted_that_requests_are_held(make):
    it = make(1)
    it.add("x", B)
    it.add("y", B)
    for now_s in (1.0, 1.5, 4.0):
        it.driver.now_s = now_s
        it.step()
    assert it.scheduler.adapters.held_s == 2 * 3.0
    it.come()
    it.step()
    it.driver.now_s = 9.0
    it.step()
    assert it.scheduler.adapters.held_s == 2 * 3.0


class Machine(RuleBasedStateMachine):
    """The model is who has come, and which slot each resident adapter was read into."""

    policy = "fcfs"
    make = None
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(num_slots=st.integers(1, 3), max_num_seqs=st.integers(2, 4))
    def begin(self, num_slots, max_num_seqs):
        self.it = type(self).make(num_slots, self.policy, max_num_seqs=max_num_seqs, num_blocks=12)
        self.num_slots = num_slots
        self.content = dict(enumerate((A, B, C)[:num_slots]))
        self.requests: dict[str, Sequence] = {}
        self.ended: Counter[str] = Counter()

    @rule(
        adapter=st.sampled_from([None, A, B, C, D]),
        max_tokens=st.integers(1, 6),
        n=st.sampled_from([1, 1, 2]),
        patience_s=st.sampled_from([None, None, 4]),
        rank=st.integers(0, 2),
    )
    def add(self, adapter, max_tokens, n, patience_s, rank):
        name, now_s = str(len(self.requests)), self.it.driver.now_s
        self.requests[name] = self.it.add(
            *(name, adapter),
            max_tokens=max_tokens,
            n=n,
            deadline_s=None if patience_s is None else now_s + patience_s,
            priority=rank,
            tenant=str(rank),
        )

    @precondition(lambda self: self.it.scheduler.has_unfinished)
    @rule()
    def step(self):
        driver = self.it.driver
        driver.now_s += 1
        output = driver.plan()
        self.check_plan(output)
        self.it.coming += output.loads
        driver.run(output)
        for each in driver.outputs:
            self.ended[each.request_id] += each.finish_reason is not None and each.index == 0

    def check_plan(self, output: SchedulerOutput):
        used = {each.lora_slot for each in self.it.scheduler.seating}
        for load in output.loads:
            assert load.slot not in used, "somebody who was admitted loses its adapter"
            self.content.pop(load.slot, None)
        for sequence, _, _ in output.scheduled:
            assert self.content.get(sequence.lora_slot) is sequence.adapter
        is_passed = bool(self.it.scheduler.waiting.num_held and output.scheduled)
        type(self).happened["held and passed"] += is_passed

    @precondition(lambda self: self.it.coming)
    @rule(fails=st.booleans())
    def come(self, fails):
        load = self.it.coming[0]
        outputs = self.it.come(EngineError("gone") if fails else None)
        if not fails:
            self.content[load.slot] = (A, B, C, D)[load.number]
        for each in outputs:
            assert self.requests[each.request_id].adapter.number == load.number
            self.ended[each.request_id] += each.index == 0
        type(self).happened["failed" if fails else "came"] += 1

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick):
        name = str(pick % len(self.requests))
        ended = self.it.scheduler.finish(name, FinishReason.ABORT)
        self.ended[name] += any(0 in each.answers for each in ended)

    @precondition(lambda self: self.it.scheduler.running)
    @rule(pick=st.integers(0, 1000))
    def preempt(self, pick):
        running = self.it.scheduler.running
        self.it.scheduler.preempt(running[pick % len(running)], self.it.driver.now_s)

    @invariant()
    def never_more_than_there_are_slots(self):
        self.it.scheduler.check_integrity()
        assert self.it.scheduler.adapters.num_resident + len(self.it.coming) <= self.num_slots

    def teardown(self):
        """Everybody is served in the end, however many still come with adapters in use."""
        names = list(self.requests)
        for index in range(40 * (len(names) + 1)):
            if all(self.ended[name] for name in names):
                break
            if index % 2 and self.policy == "fcfs":
                self.add((A, B)[index % 4 // 2], 2, 1, None, 1)
            while self.it.coming:
                self.come(fails=False)
            self.step()
        assert all(self.ended[name] == 1 for name in names)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_in_every_random_history_nobody_loses_an_adapter_and_all_are_served(policy, make):
    class OfPolicy(Machine):
        happened: ClassVar[Counter[str]] = Counter()

    OfPolicy.policy, OfPolicy.make = policy, staticmethod(make)
    run_state_machine_as_test(OfPolicy, settings=settings(max_examples=60, stateful_step_count=40))
    assert all(OfPolicy.happened[kind] > 4 for kind in ("held and passed", "came"))
