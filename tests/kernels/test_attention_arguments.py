"""What paged attention refuses: tensors of the wrong kind, and numbers that point outside."""

import math

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape

pytestmark = pytest.mark.kernels


def step_of_one(table: list[int], length: int = 30, rows: int = 1) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.tensor([table], dtype=torch.int32),
        slot_mapping=torch.full((1,), -1),
        max_query_len=rows,
        max_seq_len=length,
    )


def test_numbers_that_point_outside_the_cache_are_refused(make_backend):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache = backend.allocate(2)
    q = torch.zeros(2, 1, 16)
    with pytest.raises(IndexError):
        backend.paged_attention(q, cache, 0, step_of_one([2], length=2, rows=2), scale=1.0)
    with pytest.raises(IndexError):
        backend.write_kv_cache(q, q, cache, 0, torch.tensor([0, 16]))


# With blocks of 8 and 30 tokens, a window of 6 begins at position 24 for the last row, in block 3,
# and at position 23 for the row before it, in block 2.
@pytest.mark.parametrize(
    ("table", "rows", "window"),
    [
        ([0, 1, 2, 4], 1, None),
        ([0, 1, -1, 3], 1, None),
        ([-1, 1, 2, 3], 1, None),
        ([-1, -1, -1, -1], 1, 6),
        ([-1, -1, -1, 3], 2, 6),
        ([-1, -1, -1, 3], 1, 7),
        ([-1, -1, -2, 3], 1, 6),
        ([4, -1, -1, 3], 1, 6),
        ([0, 1, 2], 1, None),
    ],
)
def test_a_table_that_points_outside_what_rows_see_is_refused(make_backend, table, rows, window):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache, q = backend.allocate(4), torch.ones(rows, 1, 16)
    out = torch.full_like(q, 9)
    metadata = step_of_one(table, rows=rows)
    with pytest.raises(IndexError, match=r"sequence 0 has rows or blocks outside the . rows, its"):
        backend.paged_attention(q, cache, 0, metadata, scale=1.0, window=window, out=out)
    assert bool((out == 9).all())


@pytest.mark.parametrize(("rows", "window"), [(1, 6), (2, 5), (6, 1)])
def test_no_block_is_accepted_before_what_rows_see(make_backend, rows, window):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache, q = backend.allocate(4), torch.ones(rows, 1, 16)
    cache.storage.fill_(math.nan)
    cache.storage[3] = 2.0
    metadata = step_of_one([-1, -1, -1, 3], rows=rows)
    out = backend.paged_attention(q, cache, 0, metadata, scale=1.0, window=window)
    assert bool((out == 2.0).all())


@pytest.mark.parametrize(("length", "rows"), [(30, 2), (0, 1), (30, -1)])
def test_rows_outside_the_queries_or_the_sequence_are_refused(make_backend, length, rows):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache, q = backend.allocate(4), torch.ones(1, 1, 16)
    with pytest.raises(IndexError, match="outside the 1 rows"):
        backend.paged_attention(q, cache, 0, step_of_one([0, 1, 2, 3], length, rows), scale=1.0)


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        (torch.ones(1, 3, 16), {}, "q has 3 heads but must have a multiple of 2"),
        (torch.ones(1, 2, 8), {}, r"q has shape \[1, 2, 8\] but must be \[any, any, 16\]"),
        (torch.ones(1, 2, 16).half(), {}, "q is torch.float16 but must be torch.float32"),
        (torch.ones(1, 2, 16), {"window": 0}, "window is 0 but must be at least 1 or None"),
        (torch.ones(1, 2, 16), {"soft_cap": 0.0}, "soft_cap is 0.0 but must be positive and fin"),
        (torch.ones(1, 2, 16), {"soft_cap": math.inf}, "soft_cap is inf but must be positive"),
        (
            torch.ones(1, 2, 16),
            {"sinks": torch.ones(3)},
            r"sinks has shape \[3\] but must be \[2\]",
        ),
        (torch.ones(1, 2, 16), {"sinks": torch.ones(2).half()}, "sinks is torch.float16 but must"),
        (
            torch.ones(1, 2, 16),
            {"sinks": torch.ones(2, device="meta")},
            "sinks is on meta but must be on cpu",
        ),
        (torch.ones(1, 2, 16, device="meta"), {}, "metadata is on cpu but must be on meta"),
        (torch.ones(1, 2, 16), {"out": torch.ones(2, 2, 16)}, r"out has shape \[2, 2, 16\]"),
    ],
)
def test_wrong_queries_are_refused(make_backend, q, options, message):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, torch.float32))
    with pytest.raises(ValueError, match=message):
        backend.paged_attention(
            q, backend.allocate(1), 0, step_of_one([0], length=1), scale=1.0, **options
        )


def test_wrong_keys_are_refused(make_backend):
    backend = make_backend(KVCacheShape(1, 2, 16, 8, torch.float32))
    k, cache = torch.ones(3, 2, 16), backend.allocate(1)
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 16\] but must be \[3, 2, 16\]"):
        backend.write_kv_cache(k, k[:2], cache, 0, torch.arange(3))
    with pytest.raises(ValueError, match=r"slot_mapping is torch.int32 but must be torch.int64"):
        backend.write_kv_cache(k, k, cache, 0, torch.arange(3).int())
    with pytest.raises(ValueError, match="slot_mapping is on meta but must be on cpu"):
        backend.write_kv_cache(k, k, cache, 0, torch.arange(3, device="meta"))


def test_wrong_metadata_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"query_start_loc has shape \[1\] but must be \[2\]"):
        AttentionMetadata(
            torch.zeros(1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            1,
            1,
        )
    with pytest.raises(ValueError, match="block_tables is on meta but must be on cpu"):
        AttentionMetadata(
            torch.zeros(2, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32, device="meta"),
            torch.zeros(1, dtype=torch.int64),
            1,
            1,
        )
    with pytest.raises(ValueError, match="block_size is 0 but must be at least 1"):
        KVCacheShape(1, 1, 16, 0, torch.float32)
    with pytest.raises(ValueError, match=r"dtype is torch.int8 but must be torch.float32 or"):
        KVCacheShape(1, 1, 16, 8, torch.int8)
