"""A query row's bits depend on its own past alone; every test compares for equality."""

import math

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape

pytestmark = pytest.mark.kernels

LENS = [150, 65, 333, 1, 64]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
def test_block_size_changes_no_bit(make_batch, dtype, any_backend_name, block_size, window):
    batch = make_batch(LENS, dtype=dtype)
    expected = batch.attend(any_backend_name, block_size=16, window=window)
    assert_same(batch.attend(any_backend_name, block_size=block_size, window=window), expected)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (1, 1, 16), (1, 8, 80)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_and_decoding_give_the_bits_of_one_whole_prefill(
    make_batch, dtype, any_backend_name, chunk, window, kv_heads, group, head_dim
):
    batch = make_batch([140], kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    (whole,) = batch.attend(any_backend_name, window=window)
    ends = range(chunk, 140 + 1, chunk)
    parts = [
        batch.attend(any_backend_name, query_lens=[chunk], seq_lens=[end], window=window)[0]
        for end in ends
    ]
    assert torch.equal(torch.cat(parts), whole[: ends[-1]])


def test_batch_mates_change_no_bit(make_batch, dtype, any_backend_name):
    batch = make_batch(LENS, dtype=dtype)
    query_lens = [77, 1, 2, 1, 64]
    together = batch.attend(any_backend_name, query_lens=query_lens)
    for i in range(len(LENS)):
        assert_same(batch.attend(any_backend_name, query_lens=query_lens, only=i), [together[i]])


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e4])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_what_unused_slots_hold_changes_no_bit(
    make_batch, dtype, any_backend_name, poison, block_size
):
    batch = make_batch(LENS, dtype=dtype)
    options = {"query_lens": [77, 1, 2, 1, 64], "block_size": block_size}
    for window in (None, 33):
        expected = batch.attend(any_backend_name, poison=0.0, window=window, **options)
        assert all(bool(x.isfinite().all()) for x in expected)
        assert_same(
            batch.attend(any_backend_name, poison=poison, window=window, **options), expected
        )


@pytest.mark.parametrize("unseen", ["poisoned", "gone"])
@pytest.mark.parametrize("window", [1, 17, 33, 64])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_blocks_out_of_the_window_of_all_rows_change_no_bit(
    make_batch, dtype, any_backend_name, block_size, window, unseen
):
    batch = make_batch([150, 65, 333, 1, 64, 700], dtype=dtype)
    options = {"query_lens": [77, 1, 2, 1, 64, 5], "block_size": block_size, "window": window}
    expected = batch.attend(any_backend_name, **options)
    assert_same(batch.attend(any_backend_name, unseen=unseen, **options), expected)


def test_a_block_can_be_read_by_another_sequence_in_the_step_that_writes_it(
    make_batch, make_any_backend, any_backend_name, dtype
):
    batch = make_batch([40, 37], dtype=dtype)
    batch.k[1][:32], batch.v[1][:32] = batch.k[0][:32], batch.v[0][:32]
    expected = batch.attend(any_backend_name, query_lens=[40, 5])
    backend = make_any_backend(KVCacheShape(1, 3, 64, 16, dtype))
    cache = backend.allocate(5)
    cache.storage.fill_(math.nan)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 40, 45], dtype=torch.int32),
        seq_lens=torch.tensor([40, 37], dtype=torch.int32),
        block_tables=torch.tensor([[4, 1, 3], [4, 1, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([*range(64, 80), *range(16, 32), *range(48, 56), *range(5)]),
        max_query_len=40,
        max_seq_len=40,
    )
    k, v = torch.cat([batch.k[0], batch.k[1][32:]]), torch.cat([batch.v[0], batch.v[1][32:]])
    backend.write_kv_cache(k, v, cache, 0, metadata.slot_mapping)
    q = torch.cat([batch.q[0], batch.q[1][32:]])
    out = backend.paged_attention(q, cache, 0, metadata, scale=64**-0.5)
    assert_same(list(out.split([40, 5])), expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("position", [10, 63, 64, 99])
def test_a_later_token_that_is_not_finite_spoils_no_earlier_row(
    make_batch, dtype, any_backend_name, position, poison
):
    batch = make_batch([100], dtype=dtype)
    (expected,) = batch.attend(any_backend_name)
    batch.k[0][position] = poison
    batch.v[0][position] = poison
    (spoiled,) = batch.attend(any_backend_name)
    assert torch.equal(spoiled[:position], expected[:position])
    assert not bool(spoiled[position:].isfinite().all(-1).any())


def test_soft_cap_and_sinks_leave_a_row_to_its_own_past(make_batch, dtype, any_backend_name):
    batch = make_batch([150, 65], dtype=dtype)
    options = {"window": 50, "soft_cap": 3.0, "sinks": torch.randn(batch.q_heads)}
    whole = batch.attend(any_backend_name, **options)
    parts = [
        batch.attend(any_backend_name, query_lens=[rows], seq_lens=[end], only=0, **options)[0]
        for rows, end in ((77, 77), (1, 78), (72, 150))
    ]
    assert torch.equal(torch.cat(parts), whole[0])


def test_thread_count_changes_no_bit(make_batch, dtype, any_backend_name, threads):
    batch = make_batch(LENS, dtype=dtype)
    actual = batch.attend(any_backend_name)
    torch.set_num_threads(3 - threads)
    assert_same(batch.attend(any_backend_name), actual)
