"""What `octavo inspect` shows of a scheduler, and that looking changes nothing."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest

from octavo.cache.block_hash import block_key, chain_hash, root_hash
from octavo.cache.block_pool import BlockPool
from octavo.inspection import BlockState, inspect_scheduler
from octavo.sequence import NO_BLOCK, SequenceStatus

FIRST = block_key(root_hash(""), [7001, 7002, 7003, 7004])
SECOND = block_key(chain_hash(FIRST), [7005, 7006, 7007, 7008])
OTHER = block_key(root_hash("salt"), [7001, 7002, 7003, 7004])


@pytest.fixture
def device():
    """Return blocks 0 and 1 owned by two, 2 and 3 by one, 4 cached, and two free ones."""
    pool = BlockPool(7)
    pool.take(5)
    for block, key in ((0, FIRST), (1, SECOND), (4, OTHER)):
        pool.publish(block, key)
    pool.share(0)
    pool.share(1)
    pool.release([4])
    return pool


@pytest.fixture
def host():
    """Return a pool whose first block of two is owned."""
    pool = BlockPool(2)
    pool.take(1)
    return pool


@pytest.fixture
def scheduler(device, host, make_sequence):
    """Return two forks over a shared prefix, a swapped sequence and one that waits."""
    prompt = [*range(7001, 7010)]
    first = make_sequence("a", prompt, n=2, lora_name="x", tenant="gold", arrival_s=90.0)
    first.status = SequenceStatus.RUNNING
    first.num_computed_tokens, first.block_table = 9, [0, 1, 2]
    first.append_token(7010)
    second = first.fork(1)
    second.status = SequenceStatus.RUNNING
    second.num_computed_tokens, second.block_table = 9, [0, 1, 3]
    first.append_token(7011)
    first.num_computed_tokens = 10
    swapped = make_sequence("b", prompt[:4], priority=2, arrival_s=91.0)
    swapped.status = SequenceStatus.SWAPPED
    swapped.num_computed_tokens, swapped.host_table, swapped.num_preemptions = 3, [0], 1
    swapped.clock.turn("preempted_s", 98.5)
    waiting = make_sequence("c", prompt[:5], arrival_s=99.25)
    return SimpleNamespace(
        cache=SimpleNamespace(
            block_size=4, device_pool=device, host_pool=host, num_query_tokens=18, num_hit_tokens=8
        ),
        sequences=lambda: iter([first, second, swapped, waiting]),
        num_swap_preemptions=1,
        num_recompute_preemptions=5,
    )


def test_the_json_is_this(scheduler):
    shown = {"num_prompt_tokens": 9, "num_cached_tokens": 0, "num_preemptions": 0}
    running = {"status": "running", "tenant": "gold", "priority": 0, "waiting_s": None}
    running["lora_name"] = "x"
    assert json.loads(inspect_scheduler(scheduler, 100.0).to_json()) == {
        "block_size": 4,
        "device": {
            "states": "ssuuc..",
            "hashes": {
                "0": chain_hash(FIRST).hex()[:12],
                "1": chain_hash(SECOND).hex()[:12],
                "4": chain_hash(OTHER).hex()[:12],
            },
            "num_owners": {"0": 2, "1": 2},
            "counts": {"free": 2, "cached": 1, "used": 2, "shared": 2},
        },
        "host": {
            "states": "u.",
            "hashes": {},
            "num_owners": {},
            "counts": {"free": 1, "cached": 0, "used": 1, "shared": 0},
        },
        "sequences": [
            {
                **shown,
                **running,
                "request_id": "a",
                "index": 0,
                "num_tokens": 11,
                "num_computed_tokens": 10,
                "block_table": [0, 1, 2],
                "host_table": [],
                "age_s": 10.0,
            },
            {
                **shown,
                **running,
                "request_id": "a",
                "index": 1,
                "num_tokens": 10,
                "num_computed_tokens": 9,
                "block_table": [0, 1, 3],
                "host_table": [],
                "age_s": 10.0,
            },
            {
                "request_id": "b",
                "index": 0,
                "status": "swapped",
                "lora_name": None,
                "tenant": "",
                "priority": 2,
                "num_prompt_tokens": 4,
                "num_tokens": 4,
                "num_computed_tokens": 3,
                "num_cached_tokens": 0,
                "num_preemptions": 1,
                "block_table": [],
                "host_table": [0],
                "age_s": 9.0,
                "waiting_s": 1.5,
            },
            {
                "request_id": "c",
                "index": 0,
                "status": "waiting",
                "lora_name": None,
                "tenant": "",
                "priority": 0,
                "num_prompt_tokens": 5,
                "num_tokens": 5,
                "num_computed_tokens": 0,
                "num_cached_tokens": 0,
                "num_preemptions": 0,
                "block_table": [],
                "host_table": [],
                "age_s": 0.75,
                "waiting_s": 0.75,
            },
        ],
        "num_allocated_slots": 16,
        "num_used_slots": 8 + 2 + 1,
        "num_query_tokens": 18,
        "num_hit_tokens": 8,
        "num_swap_preemptions": 1,
        "num_recompute_preemptions": 5,
    }


def test_no_token_of_any_sequence_is_in_it(scheduler):
    inspection = inspect_scheduler(scheduler, 100.0)
    text = inspection.to_json() + repr(inspection)
    assert not [token_id for token_id in range(7001, 7012) if str(token_id) in text]


def test_it_crosses_processes_unchanged(scheduler):
    inspection = inspect_scheduler(scheduler, 100.0)
    assert pickle.loads(pickle.dumps(inspection)) == inspection


def test_looking_changes_nothing(scheduler, device, host):
    first = inspect_scheduler(scheduler, 100.0)
    assert inspect_scheduler(scheduler, 100.0) == first
    device.check_integrity([0, 0, 1, 1, 2, 3])
    host.check_integrity([0])


def test_a_block_out_of_the_window_is_no_slot(scheduler, make_sequence):
    sequence = make_sequence("a", 10)
    sequence.num_computed_tokens, sequence.block_table = 10, [NO_BLOCK, 2, 3]
    scheduler.sequences = lambda: iter([sequence])
    inspection = inspect_scheduler(scheduler, 0.0)
    assert inspection.sequences[0].block_table == (-1, 2, 3)
    assert inspection.num_used_slots == 4 + 2


def test_a_clock_that_was_read_later_gives_no_negative_time(scheduler):
    assert [each.age_s for each in inspect_scheduler(scheduler, 95.0).sequences] == [5, 5, 4, 0]


def test_the_letters_of_the_states_are_what_clients_know():
    assert {state.name: state.value for state in BlockState} == {
        "FREE": ".",
        "CACHED": "c",
        "USED": "u",
        "SHARED": "s",
    }


def test_a_real_scheduler_is_shown_in_the_order_in_which_it_serves(make_scheduler):
    """`a` and its fork run, `b` had to make room, and `c` found no seat."""
    driver = make_scheduler(num_host_blocks=6, prefix_caching=True, max_num_seqs=3)
    driver.add("a", 10, n=2)
    preempted = driver.add("b", [50, 51, 52, 53])
    driver.add("c", [60, 61, 62, 63])
    driver.steps(2)
    driver.scheduler.preempt(preempted, 1.0)
    inspection = inspect_scheduler(driver.scheduler, 1.0)
    assert [(each.request_id, each.index, each.status) for each in inspection.sequences] == [
        ("a", 0, "running"),
        ("a", 1, "running"),
        ("b", 0, "swapped"),
        ("c", 0, "waiting"),
    ]
    tables = [(each.block_table, each.host_table) for each in inspection.sequences]
    assert tables == [((0, 1, 4), ()), ((0, 1, 2), ()), ((), (0, 1)), ((), ())]
    assert inspection.device.num_owners == {0: 2, 1: 2}
    assert inspection.device.states == "ssucu" + "." * 95
    assert inspection.host.states == "uu...."
    assert [each.num_computed_tokens for each in inspection.sequences] == [11, 11, 5, 0]
    assert inspection.num_allocated_slots == 16
    assert inspection.num_used_slots == 8 + 3 + 3
    assert (inspection.num_swap_preemptions, inspection.num_recompute_preemptions) == (1, 0)
