"""Orders of sequences, and what tenants are charged."""

from __future__ import annotations

from random import Random

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.policy import MAX_IDLE_TENANTS, make_policy
from octavo.sequence import Sequence


@pytest.fixture
def make(make_request):
    """Make a sequence by its arrival number, index and fields of its request."""

    def make(arrival=0, index=0, **fields):
        sequence = Sequence(make_request(f"r{arrival}", **fields))
        sequence.arrival_number, sequence.index = arrival, index
        return sequence

    return make


def test_fcfs_is_the_order_of_arrival_and_then_of_forks(make):
    policy = make_policy("fcfs")
    first, fork, second = make(1, priority=5), make(1, index=1), make(2, tenant="b")
    assert [policy.rank(sequence) for sequence in (first, fork, second)] == [(1, 0), (1, 1), (2, 0)]
    assert len({policy.group(sequence) for sequence in (first, fork, second)}) == 1
    assert policy.outranks(first, fork)
    assert not policy.outranks(second, fork)
    assert not policy.outranks(first, first)


def test_priority_goes_before_arrival_and_lower_goes_first(make):
    policy = make_policy("priority")
    late, early, equal = make(9, priority=-3), make(1, priority=0), make(10, priority=-3)
    assert sorted((equal, early, late), key=policy.rank) == [late, equal, early]
    assert policy.outranks(late, early)
    assert not policy.outranks(early, late)
    assert not policy.outranks(equal, late)
    assert [policy.group(sequence) for sequence in (late, early, equal)] == [-3, 0, -3]


def test_fcfs_and_priority_take_no_heed_of_service(make):
    for name in ("fcfs", "priority"):
        policy, sequence = make_policy(name, "a=5"), make(3, tenant="a")
        policy.arrive(sequence)
        before = policy.rank(sequence)
        policy.serve(sequence, 100)
        assert policy.rank(sequence) == before
        policy.leave(sequence)


def test_fair_puts_the_tenant_first_that_got_least_and_equals_by_arrival(make):
    policy = make_policy("fair")
    a, a_later, b = make(1, tenant="a"), make(2, tenant="a"), make(3, tenant="b")
    for sequence in (a, a_later, b):
        policy.arrive(sequence)
    assert sorted((b, a_later, a), key=policy.rank) == [a, a_later, b]
    policy.serve(a, 1)
    assert sorted((b, a_later, a), key=policy.rank) == [b, a, a_later]
    policy.serve(b, 2)
    assert sorted((b, a_later, a), key=policy.rank) == [a, a_later, b]
    assert policy.rank(b) == (2.0, 3, 0)


def test_fair_preempts_nobody(make):
    policy = make_policy("fair")
    a, b = make(1, tenant="a"), make(2, tenant="b")
    policy.arrive(a)
    policy.arrive(b)
    policy.serve(a, 1000)
    assert policy.rank(b) < policy.rank(a)
    assert not policy.outranks(b, a)


def test_a_weight_makes_tokens_cheaper(make):
    policy = make_policy("fair", "gold=4, free = 0.5,=2")
    charged = {}
    for arrival, tenant in enumerate(["gold", "free", "", "other"]):
        sequence = make(arrival, tenant=tenant)
        policy.arrive(sequence)
        policy.serve(sequence, 8)
        charged[tenant] = policy.rank(sequence)[0]
        policy.leave(sequence)
        policy = make_policy("fair", "gold=4, free = 0.5,=2")
    assert charged == {"gold": 2.0, "free": 16.0, "": 4.0, "other": 8.0}


def test_idle_time_earns_no_credit(make):
    policy = make_policy("fair")
    busy, idle = make(1, tenant="busy"), make(2, tenant="idle")
    policy.arrive(busy)
    policy.arrive(idle)
    policy.serve(idle, 10)
    policy.leave(idle)
    policy.serve(busy, 500)
    back = make(3, tenant="idle")
    policy.arrive(back)
    assert policy.rank(back) == (500.0, 3, 0)
    new = make(4, tenant="new")
    policy.arrive(new)
    assert policy.rank(new) == (500.0, 4, 0)


def test_leaving_and_coming_back_drops_no_debt(make):
    policy = make_policy("fair")
    greedy, other = make(1, tenant="greedy"), make(2, tenant="other")
    policy.arrive(greedy)
    policy.arrive(other)
    policy.serve(greedy, 300)
    policy.serve(other, 100)
    policy.leave(greedy)
    back = make(3, tenant="greedy")
    policy.arrive(back)
    assert policy.rank(back) == (300.0, 3, 0)


def test_a_tenant_is_lifted_only_when_none_of_its_sequences_is_live(make):
    policy = make_policy("fair")
    a, a_later, b = make(1, tenant="a"), make(3, tenant="a"), make(2, tenant="b")
    policy.arrive(a)
    policy.arrive(b)
    policy.serve(b, 50)
    policy.leave(b)
    policy.arrive(a_later)
    policy.leave(a)
    assert policy.rank(a_later) == (0.0, 3, 0)


def test_after_everybody_left_newcomers_begin_where_the_last_one_stood(make):
    policy = make_policy("fair")
    a, b = make(1, tenant="a"), make(2, tenant="b")
    policy.arrive(a)
    policy.arrive(b)
    policy.serve(a, 70)
    policy.serve(b, 40)
    policy.leave(a)
    policy.leave(b)
    new, a_back = make(3, tenant="new"), make(4, tenant="a")
    policy.arrive(new)
    policy.arrive(a_back)
    assert [policy.rank(new)[0], policy.rank(a_back)[0]] == [40.0, 70.0]


def test_tenants_that_vanished_are_forgotten_and_the_largest_debts_last(make):
    policy = make_policy("fair")
    policy.arrive(make(0, tenant="stays"))
    for number in range(2 * MAX_IDLE_TENANTS + 1):
        passer = make(number + 1, tenant=f"t{number}")
        policy.arrive(passer)
        policy.serve(passer, number)
        policy.leave(passer)
    counters = []
    for number in (MAX_IDLE_TENANTS, MAX_IDLE_TENANTS + 1, 2 * MAX_IDLE_TENANTS):
        back = make(number, tenant=f"t{number}")
        policy.arrive(back)
        counters.append(policy.rank(back)[0])
    assert counters == [0.0, MAX_IDLE_TENANTS + 1.0, 2.0 * MAX_IDLE_TENANTS]


def test_a_newcomer_is_lifted_to_the_lowest_counter_of_those_live_after_any_history(make):
    policy, random = make_policy("fair"), Random(0)
    live = {}
    for turn in range(2000):
        tenant = str(random.randrange(20))
        if tenant not in live:
            live[tenant] = make(turn, tenant=tenant)
            policy.arrive(live[tenant])
        elif len(live) > 1 and random.random() < 0.3:
            policy.leave(live.pop(tenant))
        policy.serve(random.choice(list(live.values())), random.randrange(1, 9))
        newcomer = make(turn, tenant=f"newcomer {turn}")
        policy.arrive(newcomer)
        lowest = min(policy.rank(sequence)[0] for sequence in live.values())
        assert policy.rank(newcomer)[0] == lowest
        policy.leave(newcomer)


def test_counters_of_tenants_that_came_and_went_are_not_listed_forever(make):
    policy = make_policy("fair")
    policy.arrive(make(0, tenant="stays"))
    for number in range(1, 1001):
        passer = make(number, tenant=str(number))
        policy.arrive(passer)
        policy.serve(passer, 5)
        policy.leave(passer)
    assert len(policy._heap) < 100


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("gold", r"has 'gold' but each item must be tenant=weight$"),
        ("gold=4,", r"has '' but each item must be tenant=weight$"),
        ("gold=4,gold=5", r"has tenant 'gold' twice$"),
        ("=1, =1", r"has tenant '' twice$"),
        ("gold=much", r"the weight 'much' but it must be a number from 0.001 to 1,000$"),
        ("gold=", r"the weight '' but it must be"),
        ("gold=0", r"gives tenant 'gold' the weight '0' but it must be"),
        ("a=1,gold=-1", r"gives tenant 'gold' the weight '-1' but"),
        ("gold=nan", r"the weight 'nan' but"),
        ("gold=inf", r"the weight 'inf' but"),
        ("gold=1001", r"the weight '1001' but"),
    ],
)
def test_weights_that_cannot_be_are_refused_by_name(weights, message):
    for name in ("fair", "fcfs"):
        with pytest.raises(ConfigError, match=r"^option tenant_weights .*" + message):
            make_policy(name, weights)


def test_a_tenant_may_have_an_equals_sign_in_its_name(make):
    policy, sequence = make_policy("fair", "a=b=2"), make(0, tenant="a=b")
    policy.arrive(sequence)
    policy.serve(sequence, 2)
    assert policy.rank(sequence)[0] == 1.0


def test_an_unknown_policy_is_refused():
    message = r"^option scheduling_policy is 'best' but must be one of fcfs, priority, fair$"
    with pytest.raises(ConfigError, match=message):
        make_policy("best")
