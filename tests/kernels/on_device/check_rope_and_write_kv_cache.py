import math

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape
from octavo_kernels._attention_launch import AttentionConfig
from octavo_kernels._launch import choose_apply_rope
from octavo_kernels._triton.apply_rope import launch_apply_rope
from octavo_kernels._triton.rope_and_write_kv_cache import launch_rope_and_write_kv_cache
from octavo_kernels._triton.write_kv_cache import launch_write_kv_cache
from octavo_kernels.triton_attention import TritonAttention

pytestmark = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def make_table(max_len: int, rotary_dim: int, device) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_len), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def make_cache(num_blocks, kv_heads, block_size, head_dim, dtype, device):
    """Return keys and values of the second of two layers, every element 7."""
    shape = (num_blocks, 2, 2, kv_heads, block_size, head_dim)
    storage = torch.full(shape, 7.0, dtype=dtype, device=device)
    return storage, (storage[:, 1, 0], storage[:, 1, 1])


def rope_then_write(tensors, layer, positions, table, slots, config, interleaved):
    """Do the same by two kernels; return the rotated q."""
    q, k, v = tensors
    turned = torch.empty_like(q), torch.empty_like(k)
    launch_apply_rope((q, k, *turned), positions, table, config, interleaved=interleaved)
    launch_write_kv_cache(turned[1], v, *layer, slots)
    return turned[0]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(1, 1, 64, 64, 16), (17, 3, 128, 32, 8), (9, 3, 10, 6, 5), (5, 5, 200, 130, 16)],
)
def test_it_has_the_bits_of_the_two_kernels_and_touches_nothing_else(
    q_heads,
    kv_heads,
    head_dim,
    rotary_dim,
    block_size,
    interleaved,
    dtype,
    device,
    capability,
    surround,
    assert_surrounded,
):
    q = surround(torch.randn(5, q_heads, head_dim).to(dtype), 6)
    k = surround(torch.randn(5, kv_heads, head_dim).to(dtype))
    v = torch.randn(5, kv_heads, head_dim).to(dtype)
    v[4, 0, 3] = math.inf
    v, q_out = surround(v, 1, 9), surround(torch.zeros_like(q))
    positions = torch.tensor([49, 3, 0, 7, 7], device=device)
    table, config = (
        make_table(50, rotary_dim, device),
        choose_apply_rope(rotary_dim // 2, capability),
    )
    slots = [4 * block_size - 1, -1, 0, 4 * block_size, block_size + 1]
    slots = torch.tensor(slots, device=device)  # a slot of -1, and one past the cache
    sizes = (4, kv_heads, block_size, head_dim, dtype, device)
    expected, layer = make_cache(*sizes)
    turned = rope_then_write((q, k, v), layer, positions, table, slots, config, interleaved)
    actual, layer = make_cache(*sizes)
    launch_rope_and_write_kv_cache(
        (q, k, v, q_out), layer, positions, table, slots, config, interleaved=interleaved
    )
    assert torch.equal(q_out, turned)
    assert_surrounded(q_out)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert bool(actual[1, 1, 0, 0, 1].isnan().all())
    assert int((actual != 7).any(-1).sum()) == 3 * 2 * kv_heads


def test_slices_of_a_fused_projection_turn_in_place_by_the_backend(
    interleaved, dtype, device, capability
):
    config = AttentionConfig(rows=16, tile=16, split=32, num_warps=4, num_stages=2)
    backend = TritonAttention(KVCacheShape(2, 2, 16, 8, dtype), device, config, 1)
    fused = torch.randn(5, 10 * 16).to(dtype).to(device)
    q, k, v = (x.view(5, -1, 16) for x in fused.split([96, 32, 32], dim=1))
    positions, table = torch.arange(5, device=device), make_table(8, 12, device)
    slots = torch.tensor([9, 8, -1, 3, 0], device=device)
    expected, cache = backend.allocate(2), backend.allocate(2)
    chosen = choose_apply_rope(6, capability)
    layer = expected.keys[1], expected.values[1]
    turned = rope_then_write((q, k, v), layer, positions, table, slots, chosen, interleaved)
    before = fused[:, 96:].clone()
    result = backend.rope_and_write_kv_cache(
        *(q, k, v, positions, table, cache, 1, slots), q_out=q, interleaved=interleaved
    )
    assert result is q
    assert torch.equal(q, turned)
    assert torch.equal(cache.storage, expected.storage)
    assert torch.equal(fused[:, 96:], before)


@pytest.mark.parametrize("position", [-1, 8, 2**40])
def test_a_token_whose_position_is_outside_the_table_is_nan_and_no_other(
    interleaved, position, device, capability
):
    storage, layer = make_cache(1, 1, 4, 4, torch.float32, device)
    q, k, v = torch.ones(3, 2, 1, 4, device=device)
    positions, slots = torch.tensor([position, 0], device=device), torch.tensor([0, 1]).to(device)
    table, config = make_table(8, 4, device), choose_apply_rope(2, capability)
    launch_rope_and_write_kv_cache(
        (q, k, v, q), layer, positions, table, slots, config, interleaved=interleaved
    )
    assert q.isnan().flatten(1).all(1).tolist() == [True, False]
    assert storage[0, 1, 0, 0].isnan().all(1).tolist() == [True, False, False, False]
    assert not bool(storage[0, 1, 1].isnan().any())


def test_a_graph_gives_the_same_bits(interleaved, device):
    config = AttentionConfig(rows=16, tile=16, split=32, num_warps=4, num_stages=2)
    backend = TritonAttention(KVCacheShape(2, 2, 16, 8, torch.float32), device, config, 1)
    metadata = AttentionMetadata(
        torch.tensor([0, 5], dtype=torch.int32, device=device),
        torch.tensor([5], dtype=torch.int32, device=device),
        torch.tensor([[1]], dtype=torch.int32, device=device),
        torch.arange(8, 13, device=device),
        5,
        5,
    )
    table = make_table(8, 12, device)

    def attend(fused, cache):
        q, k, v = (x.view(5, -1, 16) for x in fused.split([64, 32, 32], dim=1))
        positions, slots = torch.arange(5, device=device), metadata.slot_mapping
        backend.write_kv_cache(k, v, cache, 0, slots)
        q = backend.rope_and_write_kv_cache(
            *(q, k, v, positions, table, cache, 1, slots), q_out=q, interleaved=interleaved
        )
        return [
            backend.paged_attention(q, cache, layer, metadata, scale=0.25, window=3)
            for layer in range(2)
        ]

    fused = torch.randn(5, 8 * 16, device=device)
    expected, cache = backend.allocate(2), backend.allocate(2)
    outs = attend(fused.clone(), expected)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(fused, cache)
    assert torch.equal(cache.storage, expected.storage)
    for actual, out in zip(compiled, outs, strict=True):
        assert torch.equal(actual, out)


@pytest.mark.parametrize(
    "name", ["triton_write_kv_cache", "triton_rope_and_write_kv_cache", "triton_paged_attention"]
)
def test_an_operation_holds_what_torch_asks_of_one(name, interleaved, device):
    q, (k, v) = torch.randn(3, 4, 8, device=device), torch.randn(2, 3, 2, 8, device=device)
    _, layer = make_cache(2, 2, 8, 8, torch.float32, device)
    positions, slots = torch.arange(3, device=device), torch.arange(8, 11, device=device)
    step = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [3], [[1]]))
    table, out = make_table(5, 6, device), torch.empty_like(q)
    arguments = {
        "triton_write_kv_cache": (k, v, *layer, slots),
        "triton_rope_and_write_kv_cache": (
            *(q, k, v, positions, table, *layer, slots, out, interleaved),
        ),
        "triton_paged_attention": (
            *(q, *layer, *step, 3, 0.5, 2, 9.0, torch.zeros(4, device=device), out),
            [16, 16, 32, 4, 2, 2, 1],
        ),
    }
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, arguments[name])
