import math

import pytest
import torch

from octavo_kernels._triton.write_kv_cache import launch_write_kv_cache


def make_cache(num_blocks, kv_heads, block_size, head_dim, dtype, device):
    """Return keys and values of the second of two layers, every element 7."""
    shape = (num_blocks, 2, 2, kv_heads, block_size, head_dim)
    storage = torch.full(shape, 7.0, dtype=dtype, device=device)
    return storage, storage[:, 1, 0], storage[:, 1, 1]


@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 10, 5)])
def test_mapped_slots_of_one_layer_are_written_and_nothing_else(
    kv_heads, head_dim, block_size, dtype, device, surround
):
    storage, keys, values = make_cache(4, kv_heads, block_size, head_dim, dtype, device)
    k, v = torch.randn(2, 5, kv_heads, head_dim).to(dtype)
    slots = [4 * block_size - 1, -1, 0, 4 * block_size, block_size + 1]
    launch_write_kv_cache(
        surround(k), surround(v, 1, 9), keys, values, torch.tensor(slots, device=device)
    )
    expected = torch.full_like(storage, 7.0)
    for token in (0, 2, 4):  # a slot of -1, and one past the cache, write nowhere
        block, offset = divmod(slots[token], block_size)
        expected[block, 1, 0, :, offset] = k[token].to(device)
        expected[block, 1, 1, :, offset] = v[token].to(device)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("spoiler", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_kept_in_its_key(spoiler, dtype, device):
    storage, keys, values = make_cache(1, 2, 16, 32, dtype, device)
    k, v = torch.ones(2, 1, 2, 32, dtype=dtype, device=device)
    v[0, 1, 5] = spoiler
    launch_write_kv_cache(k, v, keys, values, torch.tensor([3], device=device))
    assert bool(keys[0, 1, 3].isnan().all())
    assert values[0, 1, 3].tolist() == [1.0] * 5 + [0.0] + [1.0] * 26
    assert bool((keys[0, 0, 3] == 1).all())
    assert not bool(storage[:, :, 1].isnan().any())


def test_no_tokens_write_nothing(device):
    storage, keys, values = make_cache(1, 1, 8, 16, torch.float32, device)
    nothing = torch.empty(0, 1, 16, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    launch_write_kv_cache(nothing, nothing, keys, values, slots)
    assert bool((storage == 7).all())
