"""Who is admitted first and who makes room, under `priority` and `fair`.

A plan reads (name, tokens, how many draw a token), and a block holds 4 tokens.
"""

from __future__ import annotations

from collections import Counter

import pytest


@pytest.fixture
def make(make_scheduler):
    """Make a driven scheduler that heeds priorities; options as for `make_scheduler`."""
    return lambda num_blocks=100, **options: make_scheduler(num_blocks, "priority", **options)


def test_lower_priorities_are_admitted_first_and_equals_by_arrival(make):
    driver = make(max_num_seqs=3)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        driver.add(name, priority=priority)
    assert driver.step() == [("c", 5, 1), ("e", 5, 1), ("a", 5, 1)]
    assert driver.waiting == ["d", "b"]


def test_a_lower_priority_takes_the_seat_of_the_last(make):
    driver = make(max_num_seqs=2)
    driver.add("a", priority=1)
    driver.add("b", priority=1)
    driver.step(31, 41)
    driver.add("urgent", priority=0, max_tokens=2)
    assert driver.step(51, 32) == [("urgent", 5, 1), ("a", 1, 1)]
    assert driver.preempted == ["b"]
    driver.add("urgent too", priority=0, max_tokens=1)
    assert driver.step(52, 61) == [("urgent", 1, 1), ("urgent too", 5, 1)]
    assert driver.preempted == ["a"]
    assert driver.waiting == ["a", "b"]
    assert driver.step(33, 42) == [("a", 7, 1), ("b", 6, 1)]


def test_equals_and_higher_priorities_wait_for_a_seat(make):
    driver = make(max_num_seqs=1)
    driver.add("a", priority=1)
    driver.step()
    driver.add("equal", priority=1)
    driver.add("higher", priority=2)
    assert driver.step() == [("a", 1, 1)]
    assert driver.waiting == ["equal", "higher"]


def test_as_many_make_room_for_a_lower_priority_as_must_last_first(make):
    driver = make(num_blocks=8)
    for priority, name in enumerate("abc"):
        driver.add(name, 7, priority=priority)
    driver.step()
    assert driver.running == ["a", "b", "c"]
    driver.add("urgent", 11, priority=-1)
    assert driver.step() == [("urgent", 11, 1), ("a", 1, 1)]
    assert driver.preempted == ["c", "b"]
    assert driver.waiting == ["b", "c"]


def test_a_lower_priority_that_cannot_fit_even_then_preempts_nobody(make):
    driver = make(num_blocks=10)
    driver.add("first", 15, priority=-2)
    driver.add("last", 3, priority=0)
    driver.step()
    driver.add("between", 19, priority=-1)
    assert driver.step() == [("first", 1, 1), ("last", 1, 1)]
    assert (driver.preempted, driver.waiting) == ([], ["between"])


def test_one_that_made_room_waits_behind_lower_priorities(make):
    driver = make(num_blocks=5, max_num_seqs=2)
    driver.add("a", 6, priority=0)
    driver.add("b", 7, priority=1)
    driver.steps(3)
    driver.add("c", 15, priority=0)
    assert driver.step() == [("a", 1, 1)]
    assert driver.preempted == ["b"]
    assert driver.waiting == ["c", "b"]


def test_a_request_of_n_takes_n_seats_of_higher_priorities(make):
    driver = make(max_num_seqs=3)
    for name in "abc":
        driver.add(name, priority=1)
    driver.step()
    driver.add("urgent", priority=0, n=2)
    assert driver.step() == [("urgent", 5, 2), ("a", 1, 1)]
    assert driver.preempted == ["c", "b"]
    assert driver.running == ["urgent", "urgent.1", "a"]


def test_one_that_made_room_for_answers_to_come_is_not_let_in_again_at_once(make):
    driver = make(num_blocks=7)
    driver.add("a", 11, priority=1)
    driver.step()
    driver.add("urgent", 4, priority=0, n=2)
    assert driver.step() == [("urgent", 4, 2)]
    assert (driver.preempted, driver.waiting) == (["a"], ["a"])


def test_free_seats_of_one_step_are_shared_by_tenants(make_scheduler):
    driver = make_scheduler(policy="fair", max_num_seqs=4)
    for tenant in "ab":
        for number in range(5):
            driver.add(f"{tenant}{number}", tenant=tenant)
    driver.step()
    assert driver.running == ["a0", "b0", "a1", "b1"]


def test_a_flood_keeps_nobody_else_waiting(make_scheduler):
    driver = make_scheduler(policy="fair", max_num_seqs=2)
    for number in range(1000):
        driver.add(f"flood{number}", tenant="flood", max_tokens=3)
    driver.steps(2)
    driver.add("single", tenant="other", max_tokens=3)
    assert driver.step() == [("flood0", 1, 1), ("flood1", 1, 1)]
    assert driver.step() == [("single", 5, 1), ("flood2", 5, 1)]


def test_fairness_preempts_nobody(make_scheduler):
    driver = make_scheduler(policy="fair", max_num_seqs=1)
    driver.add("a", tenant="a")
    driver.steps(20)
    driver.add("b", tenant="b")
    assert driver.step() == [("a", 1, 1)]
    assert driver.waiting == ["b"]


def test_idle_time_earns_no_credit_over_those_who_worked(make_scheduler):
    driver = make_scheduler(policy="fair", max_num_seqs=1)
    for number in range(20):
        driver.add(f"a{number}", tenant="a", max_tokens=1)
    driver.steps(10)
    for number in range(20):
        driver.add(f"b{number}", tenant="b", max_tokens=1)
    order = [driver.step()[0][0][0] for _ in range(10)]
    assert order == list("ababababab")


def test_a_tenant_that_was_away_comes_back_without_credit(make_scheduler):
    driver = make_scheduler(policy="fair", max_num_seqs=1)
    driver.add("b", tenant="b", max_tokens=1)
    driver.step()
    for number in range(20):
        driver.add(f"a{number}", tenant="a", max_tokens=1)
    driver.steps(10)
    for number in range(20):
        driver.add(f"b{number}", tenant="b", max_tokens=1)
    order = [driver.step()[0][0][0] for _ in range(10)]
    assert order == list("ababababab")


def test_service_follows_the_weights(make_scheduler):
    driver = make_scheduler(
        policy="fair", max_num_seqs=3, max_num_batched_tokens=16, tenant_weights="gold=2,free=1"
    )
    for number in range(400):
        for tenant, prompt in (("gold", 20), ("free", 7)):
            driver.add(f"{tenant}{number}", prompt, tenant=tenant, max_tokens=1 + number % 9)
    served: Counter[str] = Counter()
    for _ in range(300):
        for name, num_tokens, _ in driver.step():
            served[name[:4]] += num_tokens
    assert driver.waiting
    assert driver.scheduler.num_preemptions == 0
    # Three requests may be under way, of at most 28 computed tokens each.
    assert abs(served["gold"] / 2 - served["free"]) <= 3 * 28
    assert served["free"] > 900
