import math

import pytest
import torch

from octavo_kernels import KVCacheShape, apply_rope

pytestmark = pytest.mark.kernels

FORMS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# One past the last block of eight is refused; -1 writes nowhere.
SLOTS = [31, -1, 0, 9, 8]


def make_table(max_len: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_len), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def fill(cache):
    cache.storage.fill_(7)
    return cache


@FORMS
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (128, 32), (10, 6), (22, 2), (16, 16)]
)
def test_it_has_the_bits_of_apply_rope_then_write_kv_cache(
    make_backend, head_dim, rotary_dim, interleaved, dtype, threads
):
    backend = make_backend(KVCacheShape(2, 2, head_dim, 8, dtype))
    q = torch.randn(40, 6, head_dim).to(dtype)
    k, v = torch.randn(2, 40, 2, head_dim).to(dtype)
    positions, table = torch.randint(50, (40,)), make_table(50, rotary_dim)
    slots = torch.randperm(64)[:40]
    slots[7] = -1
    expected, actual = fill(backend.allocate(8)), fill(backend.allocate(8))
    turned, k_turned = apply_rope(q, k, positions, table, interleaved=interleaved)
    backend.write_kv_cache(k_turned, v, expected, 1, slots)
    before = q.clone(), k.clone()
    result = backend.rope_and_write_kv_cache(
        q, k, v, positions, table, actual, 1, slots, interleaved=interleaved
    )
    assert torch.equal(result, turned)
    assert torch.equal(actual.storage, expected.storage)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@FORMS
def test_each_instruction_set_has_the_bits_of_its_own_rotation_and_write(
    make_any_backend, interleaved, dtype, assert_near
):
    backend = make_any_backend(KVCacheShape(1, 2, 20, 8, dtype))
    k, v = torch.randn(2, 5, 2, 20).to(dtype)
    positions, table, slots = torch.arange(5), make_table(8, 12), torch.tensor(SLOTS)
    caches = [fill(backend.allocate(4)) for _ in range(3)]
    arguments = {"v": v, "positions": positions, "cos_sin": table, "slot_mapping": slots}
    turned = backend.rope_and_write_kv_cache(
        k, k, **arguments, cache=caches[0], layer=0, interleaved=interleaved
    )
    backend.write_kv_cache(turned, v, caches[1], 0, slots)
    assert torch.equal(caches[0].storage, caches[1].storage)
    assert_near(turned, apply_rope(k, k, positions, table, interleaved=interleaved)[0])


@FORMS
def test_slices_of_a_fused_projection_turn_in_place(make_backend, interleaved, dtype):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, dtype))
    fused = torch.randn(5, 10 * 16).to(dtype)
    q, k, v = (x.view(5, -1, 16) for x in fused.split([96, 32, 32], dim=1))
    positions, table, slots = torch.arange(5), make_table(8, 12), torch.tensor(SLOTS)
    expected, actual = backend.allocate(4), backend.allocate(4)
    before = fused[:, 96:].clone()
    turned = backend.rope_and_write_kv_cache(
        *(q.clone(), k.clone(), v.clone(), positions, table, expected, 0, slots),
        interleaved=interleaved,
    )
    result = backend.rope_and_write_kv_cache(
        q, k, v, positions, table, actual, 0, slots, q_out=q, interleaved=interleaved
    )
    assert result is q
    assert torch.equal(q, turned)
    assert torch.equal(actual.storage, expected.storage)
    assert torch.equal(fused[:, 96:], before)


def test_out_is_filled_and_nothing_around_it(make_backend, dtype, make_poisoned):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, dtype))
    q = torch.randn(5, 6, 16).to(dtype)
    k, v = torch.randn(2, 5, 2, 16).to(dtype)
    positions, table, slots = torch.arange(5), make_table(8, 12), torch.tensor(SLOTS)
    whole = make_poisoned(7, 8, 16, dtype=dtype)
    out = whole[1:6, 1:7]
    cache = backend.allocate(4)
    arguments = (q, k, v, positions, table, cache, 0, slots)
    assert backend.rope_and_write_kv_cache(*arguments, q_out=out) is out
    assert torch.equal(out, apply_rope(q, k, positions, table)[0])
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


def test_a_value_that_is_not_finite_is_written_as_write_kv_cache_writes_it(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, dtype))
    q, k, v = torch.randn(3, 5, 1, 16).to(dtype)
    v[2], k[3] = math.inf, math.nan
    positions, table, slots = torch.arange(5), make_table(8, 16), torch.tensor(SLOTS)
    expected, actual = backend.allocate(4), backend.allocate(4)
    _, turned = apply_rope(q, k, positions, table)
    backend.write_kv_cache(turned, v, expected, 0, slots)
    backend.rope_and_write_kv_cache(q, k, v, positions, table, actual, 0, slots)
    torch.testing.assert_close(actual.storage, expected.storage, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": torch.tensor([0, 8])}, "position 8 is outside the 8 of cos_sin"),
        ({"positions": torch.tensor([-1, 0])}, "position -1 is outside the 8 of cos_sin"),
        ({"slot_mapping": torch.tensor([0, 16])}, "slot 16 is past the cache of 2 blocks of 8"),
        ({"layer": 1}, None),
    ],
)
def test_numbers_that_point_outside_are_refused(make_backend, changed, message):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache, ones = fill(backend.allocate(2)), torch.ones(2, 1, 16)
    arguments = {
        **dict.fromkeys("qkv", ones),
        "positions": torch.arange(2),
        "cos_sin": make_table(8, 4),
        "cache": cache,
        "layer": 0,
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(IndexError, match=message):
        backend.rope_and_write_kv_cache(**(arguments | changed))
    assert bool((cache.storage == 7).all())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.ones(3, 2, 16)}, r"k has shape \[2, 1, 16\] but must be \[3, any, 16\]"),
        ({"q": torch.ones(2, 2, 16).half()}, "k is torch.float32 on cpu but must be torch.float16"),
        ({"v": torch.ones(2, 1, 8)}, r"v has shape \[2, 1, 8\] but must be \[2, 1, 16\]"),
        ({"positions": torch.ones(2).int()}, "positions is torch.int32 but must be torch.int64"),
        ({"slot_mapping": torch.arange(3)}, r"slot_mapping has shape \[3\] but must be \[2\]"),
        ({"cos_sin": torch.ones(8, 18)}, "cos_sin has 18 columns but must have an even number"),
        ({"q_out": torch.ones(2, 1, 16)}, r"q_out has shape \[2, 1, 16\] but must be \[2, 2, 16\]"),
    ],
)
def test_wrong_arguments_are_refused(make_backend, changed, message):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    arguments = {
        "q": torch.ones(2, 2, 16),
        **{name: torch.ones(2, 1, 16) for name in "kv"},
        "positions": torch.arange(2),
        "cos_sin": make_table(8, 4),
        "cache": backend.allocate(2),
        "layer": 0,
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(ValueError, match=message):
        backend.rope_and_write_kv_cache(**(arguments | changed))
