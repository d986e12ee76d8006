"""Paged attention in torch for a CPU without a compiler: all decoding sequences at once.

A sequence with one row in the step is folded: the query heads that share keys are the rows of one
matrix, padded to a multiple of four, and the matrices of all such sequences and heads are one
batched product for each split of positions. Sequences with more rows go the reference's way, and
the cache is the reference's. Knows nothing of who chose it.

Every operation is the reference's too, in its order, so its bits are the reference's, wherever a
row's bits in the products of torch do not depend on how many rows and matrices there are. Nobody
promises that: `make_folded_attention` tries it out, and gives up where they do.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from octavo_kernels._register import register
from octavo_kernels._torch_attention import (
    SPLIT,
    Placed,
    Rows,
    Softmax,
    attend_placed,
    place,
    score,
    weigh,
)
from octavo_kernels.attention import AttentionMetadata, KVCacheShape
from octavo_kernels.reference_attention import ATTEND_ARGUMENTS, ReferenceAttention

_ROW_STEP = 4  # other numbers of rows are computed by other routines, with other bits
_MOST_ROWS = 16  # query heads of one KV head that are folded: what `agree` covers


@register("folded_paged_attention", ATTEND_ARGUMENTS)
def _paged_attention(
    q: torch.Tensor,
    storage: torch.Tensor,
    layer: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attend from checked queries to one layer of a cache's storage into `out`."""
    softmax = Softmax(scale, window, soft_cap, sinks)
    keys, values = storage[:, layer].unbind(1)
    _, block_size, kv_heads, _ = keys.shape
    folds = q.shape[1] <= _MOST_ROWS * kv_heads
    decoding = []
    step = Rows(query_start_loc, seq_lens, block_tables)
    for placed in place(step, window, len(q), len(storage), block_size):
        if folds and placed.rows.stop - placed.rows.start == 1:
            decoding.append(placed)
        else:
            out[placed.rows] = attend_placed(q, keys, values, placed, softmax)
    if decoding:
        splits = _lay_out(decoding, block_tables, block_size, window)
        rows = torch.tensor([decoding[i].rows.start for i in splits.order])
        out[rows] = _attend_folded(q[rows], keys, values, splits, softmax)


class FoldedAttention(ReferenceAttention):
    """Attention backend in torch operations, float32 inside, all decoding sequences at once."""

    name = "folded torch"
    _attend = staticmethod(_paged_attention)


class _Splits(NamedTuple):
    """The splits of positions that some sequences with one row each see, longest sequence first."""

    order: list[int]
    """Which of the given sequences comes when."""
    active: list[int]
    """For each step, how many sequences have a split left: the first so many of `order`."""
    blocks: torch.Tensor
    """[steps, num_seqs, pieces] int64: the block that holds each piece of a split."""
    parts: torch.Tensor
    """[steps, num_seqs, pieces] int64: which piece of its block it is."""
    seen: torch.Tensor
    """[steps, num_seqs, SPLIT] bool: whether the row sees a position."""
    piece: int
    """Positions that lie together in one block, in one split."""


def _lay_out(
    placed: list[Placed], tables: torch.Tensor, block_size: int, window: int | None
) -> _Splits:
    firsts = [0 if window is None else max(0, p.length - window) // SPLIT for p in placed]
    counts = [(p.length - 1) // SPLIT + 1 - first for p, first in zip(placed, firsts, strict=True)]
    order = sorted(range(len(placed)), key=lambda i: -counts[i])
    active = [sum(count > step for count in counts) for step in range(max(counts))]
    length = torch.tensor([placed[i].length for i in order])[:, None]
    start = torch.tensor([firsts[i] for i in order]) + torch.arange(len(active))[:, None]
    piece = math.gcd(block_size, SPLIT)
    pieces = start[..., None] * SPLIT + torch.arange(0, SPLIT, piece)
    # A piece that the row does not see may lie past its table or in no block: any block will do.
    column = torch.minimum(pieces, length - 1) // block_size
    table = tables[torch.tensor([placed[i].sequence for i in order])].long()
    blocks = table.expand(len(active), -1, -1).gather(2, column).clamp_(min=0)
    at = start[..., None] * SPLIT + torch.arange(SPLIT)
    seen = at < length
    if window is not None:
        seen &= at >= length - window
    return _Splits(order, active, blocks, pieces % block_size // piece, seen, piece)


def _attend_folded(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, splits: _Splits, softmax: Softmax
) -> torch.Tensor:
    """Reduce the splits of all sequences step by step; q is [num_seqs, q_heads, head_dim]."""
    num_seqs, q_heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = q_heads // kv_heads
    folded = torch.zeros(num_seqs * kv_heads, -(-group // _ROW_STEP) * _ROW_STEP, head_dim)
    folded[:, :group] = q.reshape(-1, group, head_dim)
    highest = torch.full((*folded.shape[:2], 1), -math.inf)
    if softmax.sinks is not None:
        highest[:, :group] = softmax.sinks.view(kv_heads, group, 1).repeat(num_seqs, 1, 1)
    total, result = (highest > -math.inf).float(), torch.zeros_like(folded)
    for step, active in enumerate(splits.active):
        batch = slice(0, active * kv_heads)
        seen = splits.seen[step, :active].repeat_interleave(kv_heads, 0)[:, None]
        k, v = (_gather(x, splits, step, active) for x in (keys, values))
        if not seen.all():
            v.masked_fill_(~seen.mT, 0.0)  # for 0 times NaN is NaN
        scores = score(folded[batch], k, seen, softmax)
        weights, decay, highest[batch] = weigh(scores, highest[batch])
        total[batch] = total[batch] * decay + weights.sum(-1, keepdim=True)
        result[batch] = result[batch] * decay + weights @ v
    return (result / total)[:, :group].reshape(q.shape).to(q.dtype)


def _gather(layer: torch.Tensor, splits: _Splits, step: int, active: int) -> torch.Tensor:
    """Return [active * kv_heads, SPLIT, head_dim] float32 of the step's splits."""
    _, block_size, kv_heads, head_dim = layer.shape
    blocks = splits.blocks[step, :active]
    if splits.piece == block_size:
        found = layer.index_select(0, blocks.flatten())
    else:
        sizes = (len(layer), block_size // splits.piece, splits.piece, kv_heads, head_dim)
        found = layer.view(sizes)[blocks, splits.parts[step, :active]]
    gathered = torch.empty(active, kv_heads, SPLIT, head_dim)
    gathered.copy_(found.view(active, SPLIT, kv_heads, head_dim).transpose(1, 2))
    return gathered.flatten(0, 1)


def make_folded_attention(shape: KVCacheShape) -> FoldedAttention | None:
    """Return the folded backend, or None where its bits are not those of the reference."""
    cpu, trial = torch.device("cpu"), replace(shape, num_layers=1)
    backends = FoldedAttention(trial, cpu), ReferenceAttention(trial, cpu)
    counts = range(_ROW_STEP, _MOST_ROWS + 1, _ROW_STEP)
    return FoldedAttention(shape, cpu) if all(agree(*backends, rows) for rows in counts) else None


def agree(folded: ReferenceAttention, reference: ReferenceAttention, group: int) -> bool:
    """Say whether some rows come out alike to the bit, for so many query heads of a KV head.

    The sequences share their blocks, and end in different splits: a step is a product for all of
    them, for some, or for one.
    """
    shape, lens = reference.shape, torch.tensor([70, 128, 200, 201, 256, 300, 390]).int()
    draw = torch.Generator().manual_seed(0)
    longest = int(lens.max())
    blocks = -(-longest // shape.block_size)
    cache, slots = reference.allocate(blocks), torch.arange(longest)
    sizes = (longest, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(sizes, generator=draw).to(shape.dtype) for _ in range(2))
    reference.write_kv_cache(k, v, cache, 0, slots)
    q = torch.randn(len(lens), sizes[1] * group, sizes[2], generator=draw).to(shape.dtype)
    tables = torch.arange(blocks).int().expand(len(lens), -1).contiguous()
    starts = torch.arange(len(lens) + 1).int()
    metadata = AttentionMetadata(starts, lens, tables, slots[:0], 1, longest)
    outs = [
        backend.paged_attention(q, cache, 0, metadata, scale=sizes[2] ** -0.5)
        for backend in (folded, reference)
    ]
    return torch.equal(*outs)
