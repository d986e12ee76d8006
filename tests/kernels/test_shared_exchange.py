"""Processes that share a memory sum and gather through it; here each is a thread."""

import ctypes
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from octavo_kernels import SharedExchange, sum_in_order_reference
from octavo_kernels.shared_exchange import PIECE_BYTES

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT_S = 20.0


class TooLate(Exception):
    """A rank has been waited for too long."""


def give_up(peer, waited_s, limit_s=LIMIT_S):
    if waited_s > limit_s:
        raise TooLate(f"rank {peer}")


@pytest.fixture
def make_exchanges():
    """Return a function: the ends of a memory that so many ranks share."""

    def make(size, on_wait=give_up):
        memory = mmap.mmap(-1, SharedExchange.num_bytes(size))
        return [SharedExchange(memory, rank, size, on_wait) for rank in range(size)]

    return make


def on_all(exchanges, work):
    """Do work of each rank's end and rank at the same time; return what it gives."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(work, exchanges, range(len(exchanges))))


def numbers(rank, count, dtype):
    generator = torch.Generator().manual_seed(rank)
    # Of very different sizes, so that another order has other bits.
    return (torch.randn(count, generator=generator) * 10.0 ** (3 - rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 17, 1000])
def test_sums_have_the_bits_of_the_reference(size, count, dtype, make_exchanges):
    parts = [numbers(rank, count, dtype) for rank in range(size)]
    expected = sum_in_order_reference(parts)
    on_all(make_exchanges(size), lambda exchange, rank: exchange.sum_(parts[rank]))
    assert all(torch.equal(part, expected) for part in parts)


def test_the_reference_adds_in_float32_and_rounds_once():
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, -256.0)]
    # In bfloat16, 256 + 1 is 256 again.
    assert sum_in_order_reference(parts) == 2.0
    big = [torch.tensor([value]) for value in (1e8, 0.25, -1e8, 1.0)]
    assert sum_in_order_reference(big) == 1.0


def test_what_is_longer_than_a_piece_goes_in_pieces(make_exchanges):
    count = 2 * PIECE_BYTES // 4 + 3
    parts = [numbers(rank, count, torch.float32) for rank in range(2)]
    expected = sum_in_order_reference(parts)
    exchanges = make_exchanges(2)
    on_all(exchanges, lambda exchange, rank: exchange.sum_(parts[rank]))
    assert all(torch.equal(part, expected) for part in parts)
    assert [exchange.sent_bytes for exchange in exchanges] == [4 * count] * 2


def test_values_that_are_no_numbers_stay_so(make_exchanges):
    parts = [torch.tensor([float("nan"), 1.0, float("inf")]), torch.ones(3)]
    on_all(make_exchanges(2), lambda exchange, rank: exchange.sum_(parts[rank]))
    assert torch.equal(parts[0].isnan(), torch.tensor([True, False, False]))
    assert parts[1][1:].tolist() == [2.0, float("inf")]


def test_the_first_rank_gathers_what_all_have(make_exchanges):
    parts = [torch.full((3, PIECE_BYTES // 8), float(rank)) for rank in range(3)]
    first, *others = on_all(make_exchanges(3), lambda exchange, rank: exchange.gather(parts[rank]))
    assert torch.equal(torch.stack(first), torch.stack(parts))
    assert others == [[], []]


@pytest.mark.parametrize("first_round", [0, 2**32 - 40])
def test_sums_and_gathers_follow_each_other_whoever_is_late(first_round, make_exchanges):
    """The count of rounds wraps around after a while."""
    size = 3
    exchanges = make_exchanges(size)
    for exchange in exchanges:
        native = exchange.native
        native.round = first_round
        ctypes.c_uint32.from_address(native.memory + 64 * native.rank).value = first_round

    def work(exchange, rank):
        random, found = Random(rank), []
        for step in range(60):
            if random.random() < 0.1:
                time.sleep(0.001)
            value = torch.full((5,), float(step * (rank + 1)))
            if step % 3:
                exchange.sum_(value)
                found.append(value[0].item())
            else:
                found += [part[0].item() for part in exchange.gather(value)]
        return found

    first, *others = on_all(exchanges, work)
    sums = [float(6 * step) for step in range(60) if step % 3]
    assert others == [sums, sums]
    gathered = [[1.0 * step, 2.0 * step, 3.0 * step] for step in range(60) if step % 3 == 0]
    assert sorted(first) == sorted(sums + [value for step in gathered for value in step])


def test_a_rank_that_sleeps_is_woken(make_exchanges):
    early, late = make_exchanges(2)
    value = torch.ones(1)
    thread = threading.Thread(target=lambda: early.sum_(value), daemon=True)
    thread.start()
    time.sleep(0.1)  # long past its looking
    late.sum_(torch.ones(1))
    thread.join(10.0)
    assert value == 2.0


def test_what_waiting_raises_ends_the_wait(make_exchanges):
    alone, _ = make_exchanges(2, lambda peer, waited_s: give_up(peer, waited_s, 0.01))
    for exchange in (alone.sum_, alone.gather):
        with pytest.raises(TooLate, match=r"^rank 1$"):
            exchange(torch.ones(1))


def test_a_memory_of_another_size_and_other_tensors_are_refused(make_exchanges):
    with pytest.raises(ValueError, match=r"^shared_exchange: memory has 4096 bytes but must have"):
        SharedExchange(mmap.mmap(-1, 4096), 0, 2, give_up)
    exchange, _ = make_exchanges(2)
    with pytest.raises(ValueError, match=r"^shared_exchange: tensor has strides \[1, 3\]"):
        exchange.sum_(torch.ones(2, 3).T)
    with pytest.raises(ValueError, match=r"^shared_exchange: tensor is torch.int64 but must be"):
        exchange.sum_(torch.ones(2).long())
