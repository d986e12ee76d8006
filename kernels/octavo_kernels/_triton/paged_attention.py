"""Paged attention in the Triton language: one kernel for chunks and decode, one that merges splits.

A program owns some query rows of one sequence that share a KV head: neighbouring tokens times the
query heads of the group. It reduces the keys split by split, splits of a fixed size counted from
position 0, each with a softmax of its own in float32, and then merges the splits in order: in
registers where one program takes all splits of a row, else through memory, where `merge_kernel`
does the same arithmetic. Which of the two it is, and which rows share a program, changes no bit:

- products have one shape, tiles begin at multiples of TILE, and a tile or a split of which a row
  sees nothing multiplies by 1 and adds 0;
- the compiler may not fuse multiplications with additions, which it might in one kernel only.

Knows the cache of TritonAttention alone. Compiled for its targets and checked in the interpreter;
nothing was measured on a GPU.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo_kernels._attention_launch import (
    AttentionConfig,
    choose_attention,
    choose_lanes,
    num_query_blocks,
    rows_for,
)
from octavo_kernels._launch import Architecture
from octavo_kernels._triton.ahead_of_time import KernelCase

_LOG2E = 1.4426950408889634
_COMPILED_HEADS = (64, 96, 128, 256)  # each configuration's longest, and one that is padded


@triton.jit
def _find_sequence(query_start_loc, num_seqs, index, TOKENS: tl.constexpr):
    """Return the last sequence whose first query block is not after block `index`.

    Blocks hold TOKENS rows; sequence i begins at block query_start_loc[i] // TOKENS + i, which
    leaves room for its last block, and lets the grid be known without reading the lengths. With
    TOKENS = 0, blocks are rows.
    """
    found = 0
    for first in range(0, num_seqs, 256):
        i = first + tl.arange(0, 256)
        begin = tl.load(query_start_loc + i, mask=i < num_seqs, other=0)
        if TOKENS > 0:
            begin = begin // TOKENS + i
        found += tl.sum(((begin <= index) & (i < num_seqs)).to(tl.int32))
    return found - 1


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def _finite_or_zero(highest):
    """Return what to subtract: a row that has seen nothing has a maximum of -inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _merge(result, total, highest, part, part_total, part_highest):
    """Join two softmax sums: [R, D], [R] and [R] each, scores in units of log 2."""
    raised = tl.maximum(highest, part_highest)
    base = _finite_or_zero(raised)
    keep = tl.exp2(highest - base)
    add = tl.exp2(part_highest - base)
    result = result * keep[:, None] + part * add[:, None]
    return result, total * keep + part_total * add, raised


@triton.jit
def _finish(result, total, highest, sinks, heads, inside, HAS_SINKS: tl.constexpr):
    """Divide [R, D] by its sums; a sink adds its weight to the sum and has no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=inside, other=0.0) * 1.4426950408889634
        raised = tl.maximum(highest, sink)
        keep = tl.exp2(highest - raised)
        total = total * keep + tl.exp2(sink - raised)
        result = result * keep[:, None]
    return result / total[:, None]


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "num_blocks", "max_blocks", "num_splits"])
def paged_attention_kernel(
    out,  # [num_tokens, q_heads, HEAD_DIM]
    parts,  # [num_tokens, q_heads, num_splits, HEAD_DIM] float32, unless MERGES
    stats,  # [num_tokens, q_heads, num_splits, 2] float32: sum and maximum, unless MERGES
    q,  # [num_tokens, q_heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    values,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    sinks,  # [q_heads] float32, if HAS_SINKS
    query_start_loc,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    block_tables,  # [num_seqs, max_blocks] int32
    num_seqs,
    num_tokens,
    num_blocks,
    max_blocks,
    num_splits,
    q_stride,
    out_stride,
    block_stride,
    score_scale,  # scale * log2(e), or scale / soft_cap
    soft_cap,  # soft_cap * log2(e), if HAS_SOFT_CAP
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGES: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    # Later blocks of a prompt see more keys: they go first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = _find_sequence(query_start_loc, num_seqs, index, TOKENS)
    begin = tl.load(query_start_loc + sequence)
    num_rows = tl.minimum(tl.load(query_start_loc + sequence + 1), num_tokens) - begin
    first_row = (index - begin // TOKENS - sequence) * TOKENS
    if first_row >= num_rows:
        return

    lane = tl.arange(0, ROWS)  # [ROWS]
    row = first_row + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    d = tl.arange(0, PADDED_DIM)  # [PADDED_DIM]
    is_row = (lane < TOKENS * GROUP) & (row < num_rows)
    is_element = is_row[:, None] & (d < HEAD_DIM)[None, :]
    token = (begin + row).to(tl.int64)
    at_head = head[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(q + token[:, None] * q_stride + at_head, mask=is_element, other=0.0)

    before = tl.load(seq_lens + sequence) - num_rows
    own = before + row  # [ROWS] positions
    last = before + tl.minimum(first_row + TOKENS, num_rows) - 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, before + first_row - window + 1)
    table = block_tables + sequence.to(tl.int64) * max_blocks
    at_heads = kv_head * (BLOCK_SIZE * HEAD_DIM) + d  # [PADDED_DIM]

    end_split = last // SPLIT + 1
    if not MERGES:
        end_split = tl.minimum(end_split, num_splits)
    merged = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    merged_total = tl.zeros([ROWS], tl.float32)
    merged_highest = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(first // SPLIT + tl.program_id(2), end_split, tl.num_programs(2)):
        result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        start = tl.maximum(split * SPLIT, first // TILE * TILE)
        for tile in range(start, tl.minimum(split * SPLIT + SPLIT, last + 1), TILE):
            at = tile + tl.arange(0, TILE)  # [TILE] positions
            exists = (at >= first) & (at <= last) & (at < max_blocks * BLOCK_SIZE)
            block = tl.load(table + at // BLOCK_SIZE, mask=exists, other=-1)
            exists = (block >= 0) & (block < num_blocks)
            place = block.to(tl.int64) * block_stride + at % BLOCK_SIZE * HEAD_DIM
            at_keys = place[:, None] + at_heads[None, :]
            is_key = exists[:, None]
            if PADDED_DIM > HEAD_DIM:
                is_key = is_key & (d < HEAD_DIM)[None, :]
            key = tl.load(keys + at_keys, mask=is_key, other=0.0)  # [TILE, PADDED_DIM]
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
            if HAS_SOFT_CAP:
                scores = soft_cap * _tanh(scores)
            seen = at[None, :] <= own[:, None]  # [ROWS, TILE]
            if HAS_WINDOW:
                seen = seen & (at[None, :] > own[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            raised = tl.maximum(highest, tl.max(scores, 1))
            base = _finite_or_zero(raised)
            weights = tl.exp2(scores - base[:, None])
            decay = tl.exp2(highest - base)
            total = total * decay + tl.sum(weights, 1)
            value = tl.load(values + at_keys, mask=is_key, other=0.0)  # [TILE, PADDED_DIM]
            result = tl.dot(
                weights.to(value.dtype), value, result * decay[:, None], input_precision="ieee"
            )
            highest = raised
        if MERGES:
            merged, merged_total, merged_highest = _merge(
                merged, merged_total, merged_highest, result, total, highest
            )
        else:
            at_split = (token * (GROUP * tl.num_programs(1)) + head) * num_splits + split
            tl.store(parts + at_split[:, None] * HEAD_DIM + d[None, :], result, mask=is_element)
            tl.store(stats + at_split * 2, total, mask=is_row)
            tl.store(stats + at_split * 2 + 1, highest, mask=is_row)
    if MERGES:
        result = _finish(merged, merged_total, merged_highest, sinks, head, is_row, HAS_SINKS)
        tl.store(
            out + token[:, None] * out_stride + at_head,
            result.to(out.dtype.element_ty),
            mask=is_element,
        )


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def merge_kernel(
    out,  # [num_tokens, q_heads, HEAD_DIM]
    parts,  # [num_tokens, q_heads, num_splits, HEAD_DIM] float32
    stats,  # [num_tokens, q_heads, num_splits, 2] float32
    sinks,  # [q_heads] float32, if HAS_SINKS
    query_start_loc,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    num_seqs,
    num_splits,
    out_stride,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    token = tl.program_id(0)
    sequence = _find_sequence(query_start_loc, num_seqs, token, 0)
    end = tl.load(query_start_loc + sequence + 1)
    if token >= end:
        return
    own = tl.load(seq_lens + sequence) - end + token
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, own - window + 1)

    one = tl.arange(0, 1)
    head = tl.program_id(1) + one  # [1]
    d = tl.arange(0, PADDED_DIM)[None, :]  # [1, PADDED_DIM]
    at_row = token.to(tl.int64) * tl.num_programs(1) + head
    merged = tl.zeros([1, PADDED_DIM], tl.float32)
    total = tl.zeros([1], tl.float32)
    highest = tl.full([1], float("-inf"), tl.float32)
    for split in range(first // SPLIT, tl.minimum(own // SPLIT + 1, num_splits)):
        at = at_row * num_splits + split
        part = tl.load(parts + at[:, None] * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        part_total = tl.load(stats + at * 2)
        part_highest = tl.load(stats + at * 2 + 1)
        merged, total, highest = _merge(merged, total, highest, part, part_total, part_highest)
    result = _finish(merged, total, highest, sinks, head, one == 0, HAS_SINKS)
    at_out = token.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + d
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def padded_dim(head_dim: int) -> int:
    """Return the elements of a head that a program holds; products take 16 or more."""
    return max(16, 1 << (head_dim - 1).bit_length())


class Scores(NamedTuple):
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """[q_heads] float32."""


class Layer(NamedTuple):
    """One layer's cache, each [num_blocks, kv_heads, block_size, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class Rows(NamedTuple):
    """Where rows and blocks lie; fields as in AttentionMetadata."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_seq_len: int


def launch_paged_attention(
    q: torch.Tensor,
    layer: Layer,
    step: Rows,
    scores: Scores,
    config: AttentionConfig,
    out: torch.Tensor,
    *,
    num_processors: int,
) -> None:
    """Attend from checked q [num_tokens, q_heads, head_dim] to one layer's cache into `out`."""
    num_tokens, q_heads, head_dim = q.shape
    num_seqs, max_blocks = step.block_tables.shape
    if num_tokens == 0 or num_seqs == 0:
        return
    num_blocks, kv_heads, block_size, _ = layer.keys.shape
    group = q_heads // kv_heads
    rows = rows_for(config, group)
    blocks = num_query_blocks(rows, group, num_tokens, num_seqs)
    num_splits = max(1, triton.cdiv(step.max_seq_len, config.split))
    sizes = (num_tokens, q_heads, num_splits)
    split_bytes = num_tokens * q_heads * (head_dim + 2) * 4
    lanes = choose_lanes(config, blocks * kv_heads, num_splits, split_bytes, num_processors)
    parts = stats = out
    if lanes > 1:
        parts = torch.empty((*sizes, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*sizes, 2), dtype=torch.float32, device=q.device)
    scale, window, cap, sinks = scores
    shared = {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
        "SPLIT": config.split,
        "HAS_WINDOW": window is not None,
        "HAS_SINKS": sinks is not None,
        "enable_fp_fusion": False,
    }
    sinks = out if sinks is None else sinks
    paged_attention_kernel[(blocks, kv_heads, lanes)](
        *(out, parts, stats, q, *layer, sinks),
        *(step.query_start_loc, step.seq_lens, step.block_tables),
        *(num_seqs, num_tokens, num_blocks, max_blocks, num_splits),
        *(q.stride(0), out.stride(0), layer.keys.stride(0)),
        scale * _LOG2E if cap is None else scale / cap,
        0.0 if cap is None else cap * _LOG2E,
        window or 0,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=config.tile,
        HAS_SOFT_CAP=cap is not None,
        MERGES=lanes == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    if lanes > 1:
        merge_kernel[(num_tokens, q_heads)](
            *(out, parts, stats, sinks, step.query_start_loc, step.seq_lens),
            *(num_seqs, num_splits, out.stride(0), window or 0),
            num_warps=1,
            **shared,
        )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    tensor, index = f"*{dtype}", "*i32"
    types = [tensor, *["*fp32"] * 2, *[tensor] * 3, "*fp32", *[index] * 3, *["i32"] * 8]
    types += ["fp32", "fp32", "i32"]
    element_bytes = 4 if dtype == "fp32" else 2
    for head_dim in _COMPILED_HEADS:
        config = choose_attention(head_dim, element_bytes, capability)
        for merges, features in ((1, 0), (1, 1), (0, 0)):
            constants = {
                "GROUP": 4,
                "HEAD_DIM": head_dim,
                "PADDED_DIM": padded_dim(head_dim),
                "BLOCK_SIZE": 16,
                "ROWS": config.rows,
                "TILE": config.tile,
                "SPLIT": config.split,
                "HAS_WINDOW": features,
                "HAS_SOFT_CAP": features,
                "HAS_SINKS": features,
                "MERGES": merges,
            }
            yield KernelCase(
                *(paged_attention_kernel, dtype, types, constants),
                *(config.num_warps, config.num_stages, False),
            )
        merge_types = [tensor, *["*fp32"] * 3, *[index] * 2, *["i32"] * 4]
        names = ("HEAD_DIM", "PADDED_DIM", "SPLIT", "HAS_WINDOW", "HAS_SINKS")
        constants = {name: constants[name] for name in names}
        yield KernelCase(merge_kernel, dtype, merge_types, constants, 1, fp_fusion=False)
