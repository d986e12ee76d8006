"""Attention in plain torch over a cache in plain tensors, one sequence after the other.

Every product has one of two fixed sizes, and positions are reduced in splits counted from 0. Knows
blocks [block_size, kv_heads, head_dim] of one layer, and nothing of the backends.
"""

import math
from typing import NamedTuple

import torch

from octavo_kernels._attention_check import metadata_error
from octavo_kernels.attention import NO_BLOCK

SPLIT = 128
"""Positions reduced by one product: every product over keys has this size."""
_ROWS = 64  # rows of one product, for the same reason: libraries choose routines by size


class Placed(NamedTuple):
    """Where a sequence that has rows in this step lies."""

    sequence: int
    """Which sequence of the step it is."""
    rows: slice
    length: int
    """Tokens."""
    table: list[int]
    """Its blocks."""
    unseen: int
    """Blocks at the head of the table that no row sees."""


class Rows(NamedTuple):
    """Which rows each sequence has; fields as in AttentionMetadata."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


class Softmax(NamedTuple):
    """How scores become weights; fields as the arguments of AttentionBackend.paged_attention."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


def place(
    step: Rows, window: int | None, num_tokens: int, num_blocks: int, size: int
) -> list[Placed]:
    """Return where each sequence with rows lies; IndexError if one points outside."""
    starts, placed = step.query_start_loc.tolist(), []
    tables = step.block_tables.cpu()  # once: a copy for each sequence would wait each time
    for i, length in enumerate(step.seq_lens.tolist()):
        begin, end = starts[i : i + 2]
        table = tables[i, : math.ceil(length / size)].tolist()
        first_seen = 0 if window is None else max(0, length - (end - begin) - window + 1)
        unseen = first_seen // size
        valid = 0 <= begin <= end <= num_tokens and end - begin <= length
        if valid and begin < end:
            valid = (
                len(table) * size >= length
                and all(0 <= block < num_blocks for block in table[unseen:])
                and all(NO_BLOCK <= block < num_blocks for block in table[:unseen])
            )
            placed.append(Placed(i, slice(begin, end), length, table, unseen))
        if not valid:
            raise metadata_error(i, num_tokens, num_blocks)
    return placed


def _gather(layer: torch.Tensor, table: list[int], unseen: int) -> torch.Tensor:
    """Return [positions, kv_heads, head_dim] of the blocks in `table`, zeros for the unseen ones.

    Zeros, for unseen blocks need not exist, and what they hold need not be finite.
    """
    seen = layer[table[unseen:]].flatten(0, 1)
    return torch.cat([seen.new_zeros(unseen * layer.shape[1], *seen.shape[1:]), seen])


def attend_placed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, placed: Placed, softmax: Softmax
) -> torch.Tensor:
    """Attend from the rows of one sequence to its blocks of one layer's keys and values.

    Returns:
        [rows, q_heads, head_dim] of q's dtype.
    """
    k, v = (_gather(x, placed.table, placed.unseen)[: placed.length] for x in (keys, values))
    return attend_sequence(q[placed.rows], k, v, softmax)


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Attend from the last rows of one sequence to all of it.

    Args:
        q: [rows, q_heads, head_dim], the queries of its last `rows` positions.
        k: [seq_len, kv_heads, head_dim].
        v: Like k.
        softmax: How scores become weights.

    Returns:
        [rows, q_heads, head_dim] of q's dtype.
    """
    rows, q_heads, head_dim = q.shape
    seq_len, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    # The heads that share keys become rows: [kv_heads, rows * group, head_dim].
    folded = q.float().view(rows, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    own = torch.arange(seq_len - rows, seq_len, device=q.device).repeat_interleave(group)
    # A sink is where a row's running softmax begins: a maximum, and e^0 in the sum.
    begin = q.new_full((q_heads,), -math.inf, dtype=torch.float32)
    highest = begin if softmax.sinks is None else softmax.sinks
    highest = highest.view(kv_heads, group, 1).repeat(1, rows, 1)
    parts = [
        _attend_rows(*part, k, v, softmax)
        for part in zip(
            torch.split(folded, _ROWS, dim=1),
            torch.split(highest, _ROWS, dim=1),
            torch.split(own, _ROWS),
            strict=True,
        )
    ]
    result = torch.cat(parts, dim=1).view(kv_heads, rows, group, head_dim)
    return result.transpose(0, 1).reshape(rows, q_heads, head_dim).to(q.dtype)


def _attend_rows(
    q: torch.Tensor,
    highest: torch.Tensor,
    own: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Reduce the keys split by split, in order of position, with a running softmax.

    q is [kv_heads, rows, head_dim] float32 with at most _ROWS rows; highest [kv_heads, rows, 1] is
    the logit of their sinks, -inf without one; own [rows] are their positions.
    """
    rows = q.shape[1]
    q, highest, own = _pad(q, 1, _ROWS), _pad(highest, 1, _ROWS), _pad(own, 0, _ROWS)
    total, result = (highest > -math.inf).float(), torch.zeros_like(q)
    for start in range(0, int(own.max()) + 1, SPLIT):
        keys = _pad(k[start : start + SPLIT].float(), 0, SPLIT).transpose(0, 1)
        values = _pad(v[start : start + SPLIT].float(), 0, SPLIT).transpose(0, 1)
        at = torch.arange(start, start + SPLIT, device=q.device)
        seen = at <= own[:, None]
        if softmax.window is not None:
            seen &= at > own[:, None] - softmax.window
        scores = score(q, keys, seen, softmax)
        weights, decay, highest = weigh(scores, highest)
        total = total * decay + weights.sum(-1, keepdim=True)
        result = result * decay + _weighted_sum(weights, values, seen)
    return (result / total)[:, :rows]


def score(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Return the scores [batch, rows, SPLIT] of a split, -inf where `seen` (broadcast) is false.

    q is [batch, rows, head_dim] float32, keys [batch, SPLIT, head_dim].
    """
    scores = q @ keys.transpose(1, 2) * softmax.scale
    if softmax.soft_cap is not None:
        scores = softmax.soft_cap * torch.tanh(scores / softmax.soft_cap)
    return scores.masked_fill(~seen, -math.inf)


def weigh(
    scores: torch.Tensor, highest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn a split's scores into weights relative to the highest score so far.

    Returns:
        The weights, the factor that brings sums of earlier weights to the new maximum, and the new
        maximum; the last two are [batch, rows, 1] like `highest`.
    """
    raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
    # A row that has seen nothing yet keeps a maximum of -inf: subtract 0 instead of it.
    base = raised.masked_fill(raised == -math.inf, 0.0)
    return torch.exp(scores - base), torch.exp(highest - base), raised


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return weights [kv_heads, rows, positions] @ values, where `seen` [rows, positions] is true.

    Weights of unseen positions are 0, but 0 times NaN or infinity is NaN: what is not finite is
    left out of the product, and added to the rows that see it.
    """
    finite = values.isfinite()
    result = weights @ values.masked_fill(~finite, 0.0)
    wild = values.masked_fill(finite, 0.0)
    for at in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        added = weights[..., at, None] * wild[:, None, at]
        result += added.masked_fill(~seen[:, at, None], 0.0)
    return result


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Extend one dimension to `size` with zeros."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    filler = x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))
    return torch.cat([x, filler], dim=dim)
