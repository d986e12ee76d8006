"""Paged attention in plain torch: the reference, and the path of devices without native code.

The cache of a layer is [blocks, block_size, kv_heads, head_dim], for keys and for values. Knows
nothing of how other backends lay theirs out.
"""

import math

import torch

from octavo_kernels.attention import (
    AttentionMetadata,
    KVCache,
    KVCacheShape,
    check_kv,
    check_query,
)

_SPLIT = 128  # positions reduced by one product: every product over keys has this size
_ROWS = 64  # rows of one product, for the same reason: libraries choose routines by size


class ReferenceAttention:
    """Attention backend in torch operations, float32 inside, one sequence after the other."""

    name = "reference"

    def __init__(self, shape: KVCacheShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device

    def allocate(self, num_blocks: int) -> KVCache:
        """Return a zero-filled cache; see AttentionBackend."""
        shape = self.shape
        sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)

        def layers() -> tuple[torch.Tensor, ...]:
            return tuple(
                torch.zeros(sizes, dtype=shape.dtype, device=self._device)
                for _ in range(shape.num_layers)
            )

        return KVCache(layers(), layers())

    def write_kv_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values into their slots; see AttentionBackend."""
        check_kv(self.shape, k, v, slot_mapping)
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        cache.keys[layer].flatten(0, 1)[slots] = k[kept]
        cache.values[layer].flatten(0, 1)[slots] = v[kept]

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each row to its sequence; see AttentionBackend."""
        out = check_query(self.shape, q, window, out)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for i, seq_len in enumerate(lengths):
            rows = slice(starts[i], starts[i + 1])
            if starts[i] == starts[i + 1]:
                continue
            num_blocks = math.ceil(seq_len / self.shape.block_size)
            blocks = metadata.block_tables[i, :num_blocks]
            k = cache.keys[layer][blocks].flatten(0, 1)[:seq_len]
            v = cache.values[layer][blocks].flatten(0, 1)[:seq_len]
            out[rows] = attend_sequence(q[rows], k, v, scale, window)
        return out


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Attend from the last rows of one sequence to all of it.

    Args:
        q: [rows, q_heads, head_dim], the queries of its last `rows` positions.
        k: [seq_len, kv_heads, head_dim].
        v: Like k.
        scale: Factor of the scores.
        window: Positions that a row sees, its own included; None for all.

    Returns:
        [rows, q_heads, head_dim] of q's dtype.
    """
    rows, q_heads, head_dim = q.shape
    seq_len, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    # The heads that share keys become rows: [kv_heads, rows * group, head_dim].
    folded = q.float().view(rows, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    own = torch.arange(seq_len - rows, seq_len, device=q.device).repeat_interleave(group)
    parts = [
        _attend_rows(part, k, v, positions, scale, window)
        for part, positions in zip(
            torch.split(folded, _ROWS, dim=1), torch.split(own, _ROWS), strict=True
        )
    ]
    result = torch.cat(parts, dim=1).view(kv_heads, rows, group, head_dim)
    return result.transpose(0, 1).reshape(rows, q_heads, head_dim).to(q.dtype)


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Reduce the keys split by split, in order of position, with a running softmax.

    q is [kv_heads, rows, head_dim] float32 with at most _ROWS rows; own [rows] are their positions.
    """
    rows = q.shape[1]
    q = _pad(q, 1, _ROWS)
    own = _pad(own, 0, _ROWS)
    highest = q.new_full((*q.shape[:2], 1), -math.inf)
    total, result = torch.zeros_like(highest), torch.zeros_like(q)
    for start in range(0, int(own.max()) + 1, _SPLIT):
        keys = _pad(k[start : start + _SPLIT].float(), 0, _SPLIT).transpose(0, 1)
        values = _pad(v[start : start + _SPLIT].float(), 0, _SPLIT).transpose(0, 1)
        at = torch.arange(start, start + _SPLIT, device=q.device)
        seen = at <= own[:, None]
        if window is not None:
            seen &= at > own[:, None] - window
        scores = (q @ keys.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet keeps a maximum of -inf: subtract 0 instead of it.
        base = raised.masked_fill(raised == -math.inf, 0.0)
        weights, decay = torch.exp(scores - base), torch.exp(highest - base)
        total = total * decay + weights.sum(-1, keepdim=True)
        result = result * decay + weights @ values
        highest = raised
    return (result / total)[:, :rows]


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Extend one dimension to `size` with zeros."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    filler = x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))
    return torch.cat([x, filler], dim=dim)
