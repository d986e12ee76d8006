"""Copies on the CPU are made in order; the delayed ones of tests spoil what is read early."""

from __future__ import annotations

import pytest
import torch

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.executor.block_transfers import DirectTransfers, make_block_transfers
from octavo_kernels import AttentionBackend, KVCache, KVCacheShape, make_attention_backend

SHAPE = KVCacheShape(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, dtype=torch.float32)


class Blocks:
    """A cache whose every block holds one number."""

    def __init__(self, cache: KVCache, numbers: list[int]) -> None:
        self.cache = cache
        for block, number in enumerate(numbers):
            cache.storage[block] = number

    @property
    def numbers(self) -> list[float]:
        """The number of each block; all of it must be the same."""
        for block in self.cache.storage:
            assert block.isnan().all() or (block == block.flatten()[0]).all()
        return [block.flatten()[0].item() for block in self.cache.storage]


@pytest.fixture
def attention() -> AttentionBackend:
    return make_attention_backend(SHAPE, torch.device("cpu"))


@pytest.fixture
def device(attention) -> Blocks:
    return Blocks(attention.allocate(5), [10, 11, 12, 13, 14])


@pytest.fixture
def host(attention) -> Blocks:
    return Blocks(attention.allocate(3, host=True), [20, 21, 22])


COPIES = BlockCopies(
    swap_out=((1, 0), (2, 1)),
    copies=((0, 1), (1, 2)),
    swap_in=(SwapIn(8, ((0, 3),)), SwapIn(4, ((2, 4),))),
)


def test_blocks_leave_then_are_copied_then_come_back(attention, device, host):
    transfers = DirectTransfers(attention, device.cache, host.cache)
    transfers.start(COPIES)
    assert host.numbers == [11, 12, 22]
    assert device.numbers == [10, 10, 10, 11, 22]


def test_every_swap_in_arrives_at_once_and_is_told_once(attention, device, host):
    transfers = DirectTransfers(attention, device.cache, host.cache)
    assert transfers.arrived() == ()
    transfers.start(COPIES)
    transfers.start(BlockCopies(swap_in=(SwapIn(9, ((2, 0),)),)))
    transfers.wait()
    assert transfers.arrived() == (8, 4, 9)
    assert transfers.arrived() == ()


def test_a_cpu_gets_direct_transfers(attention, device, host):
    transfers = make_block_transfers(attention, device.cache, host.cache)
    assert isinstance(transfers, DirectTransfers)


def test_delayed_swap_ins_are_nan_until_they_arrive(attention, device, host, delayed_transfers):
    transfers = delayed_transfers(attention, device.cache, host.cache, num_polls=2)
    transfers.start(COPIES)
    assert host.numbers == [11, 12, 22]
    assert str(device.numbers) == "[10.0, 10.0, 10.0, nan, nan]"
    assert transfers.arrived() == transfers.arrived() == ()
    assert transfers.arrived() == (8, 4)
    assert device.numbers == [10, 10, 10, 11, 22]


def test_waiting_brings_the_oldest_delayed_swap_in(attention, device, host, delayed_transfers):
    transfers = delayed_transfers(attention, device.cache, host.cache, num_polls=9)
    transfers.start(COPIES)
    transfers.wait()
    assert transfers.arrived() == (8,)
    assert str(device.numbers) == "[10.0, 10.0, 10.0, 11.0, nan]"
