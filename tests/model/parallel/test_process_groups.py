"""What ranks say to each other, over gloo or a shared memory, and of a rank that is gone."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from octavo.errors import EngineError
from octavo.model import shared_memory
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import Shard

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "gloo"])
def way(request, monkeypatch):
    """Let tensor groups share a memory, or not, as where there is no native code."""
    if request.param == "gloo":
        monkeypatch.setattr(shared_memory, "exchanges_in_memory", lambda: False)
    return request.param


@pytest.fixture
def open_groups(way):
    """Return a function: the groups of every rank, by rank."""

    def open_all(tp_size, pp_size=1, timeout_s=20.0):
        store, size = dist.HashStore(), tp_size * pp_size

        def open_one(rank):
            rendezvous = Rendezvous(store, "127.0.0.1", timeout_s)
            return ProcessGroups(Shard.of(rank, tp_size, pp_size), CPU, rendezvous)

        with ThreadPoolExecutor(size) as pool:
            groups = list(pool.map(open_one, range(size)))
        shares = tp_size > 1 and way == "memory"
        assert all((each.exchange is not None) is shares for each in groups)
        return groups

    return open_all


def on_all(groups, work, values):
    """Do work of each rank's groups and value at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_sums_are_added_in_the_order_of_ranks(dtype, open_groups):
    # In another order 1e8 + 1 - 1e8 is another number; float16 has none so large.
    scale = 1e8 if dtype == torch.float32 else 2048.0
    terms = [torch.full((2, 3), value).to(dtype) for value in (scale, 0.25, -scale, 1.0)]
    terms[1][1, 2] = 3.0
    expected = (((terms[0].float() + terms[1]) + terms[2]) + terms[3]).to(dtype)
    on_all(open_groups(4), ProcessGroups.sum_, terms)
    for summed in terms:
        assert torch.equal(summed, expected)


def test_the_first_rank_gathers_what_all_have(open_groups):
    values = [torch.full((2, 3), float(rank)) for rank in range(3)]
    first, *others = on_all(open_groups(3), ProcessGroups.gather, values)
    assert torch.equal(torch.stack(first), torch.stack(values))
    assert others == [[], []]


def test_tensor_groups_of_different_stages_are_apart(open_groups):
    values = [torch.full((1, 2), 10.0**rank) for rank in range(4)]
    on_all(open_groups(2, 2), ProcessGroups.sum_, values)
    assert [value[0, 0].item() for value in values] == [11.0, 11.0, 1100.0, 1100.0]


def test_a_rank_alone_in_its_group_sums_nothing_and_sends_nothing(open_groups):
    (groups,) = open_groups(1)
    value = torch.ones(2, 2)
    groups.sum_(value)
    assert torch.equal(value, torch.ones(2, 2))
    assert torch.equal(groups.gather(value)[0], value)
    assert groups.sent_bytes == 0


def test_steps_reach_the_next_stage_in_order_and_sending_waits_for_nobody(open_groups):
    last, first = open_groups(1, 2)
    # Far more than sockets hold.
    steps = [torch.full((1000, 1000), float(step)) for step in range(2)]
    started_s = time.monotonic()
    for step in steps:
        first.send(step)
    assert time.monotonic() - started_s < 5
    for step in steps:
        assert torch.equal(last.receive(torch.empty(1000, 1000)), step)
    assert first.sent_bytes == 8_000_000


def test_a_rank_that_is_gone_is_named(way, open_groups):
    groups = open_groups(2, 2)
    gone = groups.pop(1)
    leave = threading.Timer(0.1, lambda: gone.__dict__.clear())
    leave.start()
    with pytest.raises(EngineError) as error:
        groups[0].sum_(torch.ones(1, 1))
    assert str(error.value).startswith(
        "rank 0 (tensor part 0 of 2, stage 1 of 2) lost rank 1 (tensor part 1 of 2, stage 1 of 2): "
        + {"memory": "it is gone", "gloo": "Connection closed by peer"}[way]
    )
    with pytest.raises(EngineError, match=r"^rank 3 \(.*\) lost rank 1 \(.*\): .*Connection "):
        send_three_steps(groups[2])
    leave.join()


def send_three_steps(groups):
    # Two may be under way without being asked for.
    for _ in range(3):
        groups.send(torch.ones(1, 1))


def test_a_rank_that_is_silent_for_too_long_is_named(open_groups):
    last, first = open_groups(1, 2, timeout_s=0.3)
    with pytest.raises(EngineError, match=r"^rank 0 \(.*\) lost rank 1 \(.*\): Timed out waiting"):
        last.receive(torch.ones(1, 1))
    del first


def test_a_rank_that_does_not_come_to_a_sum_is_named(way, open_groups):
    first, second = open_groups(2, 1, timeout_s=0.3)
    reason = {"memory": "it has not come within 0.3 s", "gloo": "Timed out waiting"}[way]
    with pytest.raises(EngineError, match=rf"^rank 0 \(.*\) lost rank 1 \(.*\): {reason}"):
        first.sum_(torch.ones(1, 1))
    del second


def test_no_rank_shares_a_memory_where_one_cannot(monkeypatch):
    can = iter([True, False])
    monkeypatch.setattr(shared_memory, "exchanges_in_memory", lambda: next(can))
    store = dist.HashStore()

    def share(rank):
        place = (rank, 2, "127.0.0.1")
        return shared_memory.share_memory(store, *place, 20.0, lambda *_: AssertionError())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(share, range(2))) == [None, None]


def test_ranks_of_other_addresses_share_no_memory():
    store = dist.HashStore()

    def share(rank):
        place = (rank, 2, f"127.0.0.{2 + rank}")
        return shared_memory.share_memory(store, *place, 20.0, lambda *_: AssertionError())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(share, range(2))) == [None, None]


def test_a_rank_that_never_comes_is_told_of():
    rendezvous = Rendezvous(dist.HashStore(), "127.0.0.1", 0.3)
    with pytest.raises(EngineError) as error:
        ProcessGroups(Shard.of(1, 2, 1), CPU, rendezvous)
    assert str(error.value).startswith(
        "rank 1 (tensor part 1 of 2, stage 0 of 1) did not reach the other ranks of its tensor "
        "group and its pipeline within 0.3 s: "
    )


def test_groups_that_nobody_holds_leave_no_socket(open_groups):
    gc.collect()  # what failed in tests before may still be held by its own traceback
    before = len(os.listdir("/proc/self/fd"))
    groups = open_groups(2, 2)
    assert len(os.listdir("/proc/self/fd")) > before
    groups.clear()
    assert len(os.listdir("/proc/self/fd")) == before
