import math

import pytest
import torch

from octavo_kernels import KVCacheShape
from octavo_kernels._block_runs import copy_staged
from octavo_kernels._launch import PiecesConfig, choose_block_moves
from octavo_kernels._triton.move_blocks import launch_gather_blocks, launch_scatter_blocks
from octavo_kernels.backends import make_attention_backend


def random_bits(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    words = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = torch.randint(-(2**15), 2**15, shape, dtype=words, device=device)
    return bits.view(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture(params=["small", "chosen"])
def config(request, capability) -> PiecesConfig:
    """Give pieces that end inside a block, and such as are chosen."""
    chosen = choose_block_moves(capability)
    return PiecesConfig(block_size=64, num_warps=2) if request.param == "small" else chosen


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_gathering_copies_bits_and_reads_blocks_outside_as_zeros(size, dtype, device, config):
    storage = random_bits(5, size, dtype=dtype, device=device)
    around = torch.full((6, size), math.nan, dtype=dtype, device=device)
    ids = torch.tensor([4, -1, 0, 5], device=device)
    launch_gather_blocks(storage, ids, around[1:5], config)
    assert_same_bits(around[1], storage[4])
    assert_same_bits(around[3], storage[0])
    assert not around[[2, 4]].any()
    assert bool(around[[0, 5]].isnan().all())


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_scattering_writes_the_named_blocks_and_no_other_memory(size, dtype, device, config):
    around = torch.full((7, size), math.nan, dtype=dtype, device=device)
    blocks = random_bits(4, size, dtype=dtype, device=device)
    ids = torch.tensor([4, -1, 0, 5], device=device)
    launch_scatter_blocks(blocks, ids, around[1:6], config)
    assert_same_bits(around[5], blocks[0])
    assert_same_bits(around[1], blocks[2])
    assert bool(around[[0, 2, 3, 4, 6]].isnan().all())


def test_no_blocks_move_nothing(device, config):
    storage, none = torch.zeros(2, 3, device=device), torch.empty(0, 3, device=device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    launch_gather_blocks(storage, ids, none, config)
    launch_scatter_blocks(none, ids, storage, config)
    assert not storage.any()


def test_offsets_past_32_bits_reach_the_right_block(device, config):
    size = 2**20
    # Only the last block is touched: of the memory before it nothing is ever taken.
    storage = torch.empty(2**11 + 2, size, dtype=torch.float16, device=device)
    blocks = random_bits(1, size, dtype=torch.float16, device=device)
    last = torch.tensor([len(storage) - 1], device=device)
    chosen = PiecesConfig(block_size=2**17, num_warps=4) if device.type == "cpu" else config
    launch_scatter_blocks(blocks, last, storage, chosen)
    out = torch.empty_like(blocks)
    launch_gather_blocks(storage, last, out, chosen)
    assert_same_bits(out, blocks)
    assert_same_bits(storage[-1:], blocks)


@pytest.mark.parametrize("staged", [False, True])
def test_blocks_go_to_the_host_and_come_back_in_order(staged, dtype, device):
    backend = make_attention_backend(KVCacheShape(2, 1, 16, 8, dtype), device)
    cache, host = backend.allocate(8), backend.allocate(6, host=True)
    cache.storage.copy_(random_bits(*cache.storage.shape, dtype=dtype, device=device))
    before = cache.storage.clone()
    out = [(5, 1), (2, 2), (7, 3), (5, 4), (0, 4)]
    back = [(1, 6), (2, 0), (3, 0), (4, 1)]
    if staged:
        copy_staged(cache.storage, host.storage, out, out=True)
        copy_staged(host.storage, cache.storage, back, out=False)
    else:
        backend.copy_blocks(cache, host, torch.tensor(out))
        backend.copy_blocks(host, cache, torch.tensor(back))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for place, block in {1: 5, 2: 2, 3: 7, 4: 0}.items():
        assert_same_bits(host.storage[place], before[block].cpu())
    for place, block in {6: 5, 0: 7, 1: 0, 2: 2, 3: 3}.items():
        assert_same_bits(cache.storage[place], before[block])
