"""What paged attention computes, against a dense formula and against its reference."""

import math

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape

pytestmark = pytest.mark.kernels

# a prefill chunk, a decode, a long prefix with two new rows, a first token, one whole tile
LENS, QUERY_LENS = [150, 65, 333, 1, 64], [77, 1, 2, 1, 64]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(None, False), (2.0, False), (9.0, True)])
def test_reference_is_dense_softmax_in_float64(
    make_batch, dense_attention, window, group, soft_cap, with_sinks
):
    batch = make_batch(LENS, group=group, head_dim=16, dtype=torch.float32)
    sinks = torch.randn(batch.q_heads) if with_sinks else None
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    outs = batch.attend("plain", query_lens=QUERY_LENS, **options)
    for out, rows, q, k, v in zip(outs, QUERY_LENS, batch.q, batch.k, batch.v, strict=True):
        expected = dense_attention(q[-rows:], k, v, **options)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_native_code_serves_odd_head_sizes(make_batch, native_name, dtype, assert_near):
    batch = make_batch(LENS, group=2, head_dim=33, dtype=dtype)
    for actual, expected in zip(batch.attend(native_name), batch.attend("plain"), strict=True):
        assert_near(actual, expected)


def test_a_sink_takes_the_weight_it_is_worth(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, dtype))
    cache, ones = backend.allocate(1), torch.ones(1, 1, 16, dtype=dtype)
    backend.write_kv_cache(0 * ones, ones, cache, 0, torch.tensor([0]))
    sinks = torch.tensor([0.0, math.log(3), 80.0, -math.inf])
    q = torch.ones(1, 4, 16, dtype=dtype)
    out = backend.paged_attention(q, cache, 0, one_sequence(1), scale=1.0, sinks=sinks)
    expected = torch.tensor([0.5, 0.25, 0.0, 1.0], dtype=dtype)[None, :, None].expand(1, 4, 16)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=1e-6)


def test_a_soft_cap_bounds_scores_of_any_size(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, dtype))
    cache, ones = backend.allocate(1), torch.ones(2, 1, 16, dtype=dtype)
    signs = torch.tensor([1.0, -1.0], dtype=dtype)[:, None, None]
    backend.write_kv_cache(signs * ones, signs * ones, cache, 0, torch.tensor([0, 1]))
    q = torch.full((2, 1, 16), 1e4, dtype=dtype)
    out = backend.paged_attention(q, cache, 0, one_sequence(2), scale=1.0, soft_cap=0.5)
    expected = torch.full((16,), math.tanh(0.5), dtype=dtype)  # of weights e^0.5 and e^-0.5
    torch.testing.assert_close(out[1, 0], expected, atol=1e-7, rtol=8e-3)


@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [
        (3, 3, 64, 16),
        (2, 1, 128, 32),
        (1, 8, 64, 8),
        (1, 7, 80, 64),
        (2, 4, 10, 16),
        (1, 2, 256, 128),
        (1, 2, 2, 256),
        (2, 2, 15, 16),
        (1, 2, 16, 5),
    ],
)
def test_attention_agrees_with_reference(
    make_batch, assert_near, dtype, kv_heads, group, head_dim, block_size, window
):
    batch = make_batch(LENS, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    options = {"query_lens": QUERY_LENS, "block_size": block_size, "window": window}
    for actual, expected in zip(
        batch.attend(**options), batch.attend("plain", **options), strict=True
    ):
        assert_near(actual, expected)


def test_scores_of_any_size_neither_overflow_nor_vanish(make_batch, dense_attention, backend_name):
    batch = make_batch([70], dtype=torch.float32, head_dim=16)
    batch.q[0] *= 1e4
    (out,) = batch.attend(backend_name)
    torch.testing.assert_close(
        out.double(),
        dense_attention(batch.q[0], batch.k[0], batch.v[0], None),
        atol=1e-4,
        rtol=1e-3,
    )


def test_new_cache_is_zero_and_as_large_as_promised(make_backend, dtype):
    shape = KVCacheShape(3, 2, 16, 8, dtype)
    cache = make_backend(shape).allocate(5)
    assert cache.num_blocks == 5
    assert cache.storage.nbytes == 5 * shape.bytes_per_block
    assert shape.bytes_per_block == 3 * 2 * 2 * 16 * 8 * dtype.itemsize
    assert not cache.storage.any()


def test_a_block_is_one_piece_of_storage_that_the_layers_share(make_backend, dtype):
    shape = KVCacheShape(3, 2, 16, 8, dtype)
    cache = make_backend(shape).allocate(5)
    assert cache.storage.is_contiguous()
    for number, view in enumerate((*cache.keys, *cache.values), start=1):
        assert view.shape[0] == 5
        view[2] = number
    for number in range(1, 7):
        assert int((cache.storage[2] == number).sum()) == 2 * 16 * 8
    assert not cache.storage[:2].any()
    assert not cache.storage[3:].any()


def test_a_cache_may_have_no_blocks(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, dtype))
    cache = backend.allocate(0)
    assert cache.num_blocks == 0
    nothing = torch.zeros(0, 2, 16, dtype=dtype)
    backend.write_kv_cache(nothing, nothing, cache, 0, torch.zeros(0, dtype=torch.int64))


def test_write_changes_the_mapped_slots_of_one_layer_only(make_backend, dtype):
    shape = KVCacheShape(2, 2, 16, 8, dtype)
    backend = make_backend(shape)
    cache = backend.allocate(6)
    cache.storage.fill_(7)
    k, v = torch.ones(4, 2, 16, dtype=dtype), torch.full((4, 2, 16), 2.0, dtype=dtype)
    backend.write_kv_cache(k, v, cache, 1, torch.tensor([3, -1, 47, 16]))
    assert bool((cache.keys[0] == 7).all())
    assert bool((cache.values[0] == 7).all())
    for written, value in ((cache.keys[1], 1), (cache.values[1], 2)):
        assert int((written == value).sum()) == 3 * 2 * 16
        assert int((written == 7).sum()) == written.numel() - 3 * 2 * 16
        assert [int((block == value).sum()) for block in written] == [32, 0, 32, 0, 0, 32]


def test_write_and_query_accept_slices_of_a_fused_projection(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, dtype))
    fused = torch.randn(5, 8 * 16).to(dtype)
    q, k, v = (x.view(5, -1, 16) for x in fused.split([64, 32, 32], dim=1))
    metadata = one_sequence(5)
    outs = []
    for tensors in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        cache = backend.allocate(1)
        backend.write_kv_cache(*tensors[1:], cache, 0, metadata.slot_mapping)
        outs.append(backend.paged_attention(tensors[0], cache, 0, metadata, scale=0.25))
    assert torch.equal(*outs)


def test_out_is_filled_and_returned_and_other_rows_are_left_alone(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, dtype))
    cache, metadata = backend.allocate(1), one_sequence(3)
    q = torch.randn(5, 4, 16).to(dtype)
    out = torch.full_like(q, 9)
    assert backend.paged_attention(q, cache, 0, metadata, scale=1.0, out=out) is out
    assert not out[:3].any()
    assert bool((out[3:] == 9).all())


def test_a_sequence_without_rows_in_this_step_is_passed_over(make_backend, dtype):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, dtype))
    cache = backend.allocate(1)
    metadata = AttentionMetadata(
        torch.tensor([0, 0, 1], dtype=torch.int32),
        torch.tensor([5, 1], dtype=torch.int32),
        torch.tensor([[-1], [0]], dtype=torch.int32),
        torch.tensor([0]),
        1,
        5,
    )
    q = torch.ones(1, 1, 16, dtype=dtype)
    backend.write_kv_cache(q, q, cache, 0, metadata.slot_mapping)
    assert torch.equal(backend.paged_attention(q, cache, 0, metadata, scale=1.0), q)


def one_sequence(length: int, block: int = 0) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.tensor([[block]], dtype=torch.int32),
        slot_mapping=torch.arange(length),
        max_query_len=length,
        max_seq_len=length,
    )
