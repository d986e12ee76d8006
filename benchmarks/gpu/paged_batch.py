"""Sequences in a paged cache of random numbers, and the attention of one step over them.

Knows the interface of attention backends, and none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo_kernels import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    KVCacheShape,
    make_attention_backend,
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sequences of equal length, of each of which the last rows attend."""

    num_seqs: int
    context: int
    """Tokens of a sequence, those of the step included."""
    rows: int = 1
    """Query tokens of a sequence: 1 in a decode step, `context` in a whole prefill."""
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode step reads."""
        return 2 * self.num_seqs * self.context * self.kv_heads * self.head_dim * self._itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step moves at least: keys and values, queries and results."""
        heads = self.kv_heads * self.group
        return (
            self.kv_bytes + 2 * self.num_seqs * self.rows * heads * self.head_dim * self._itemsize
        )

    @property
    def causal_flops(self) -> int:
        """Floating-point operations of both products, where each row sees what lies before it."""
        before = self.context - self.rows
        seen = self.rows * before + self.rows * (self.rows + 1) // 2
        return 4 * self.num_seqs * seen * self.kv_heads * self.group * self.head_dim

    @property
    def cache_shape(self) -> KVCacheShape:
        """The shape of a cache of one layer."""
        return KVCacheShape(1, self.kv_heads, self.head_dim, self.block_size, self.dtype)

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's queries, and the cache that they attend to."""

    q: torch.Tensor
    """[num_seqs * rows, q_heads, head_dim]"""
    out: torch.Tensor
    cache: KVCache
    metadata: AttentionMetadata

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Return the step's attention, in the same memory each time."""
        scale = self.q.shape[-1] ** -0.5
        return backend.paged_attention(
            self.q, self.cache, 0, self.metadata, scale=scale, out=self.out
        )


def make_step(
    shape: StepShape, device: torch.device, backend: AttentionBackend | None = None
) -> PagedStep:
    """Fill a cache of the backend's, by default the device's own; blocks lie in random order."""
    backend = backend or make_attention_backend(shape.cache_shape, device)
    blocks = -(-shape.context // shape.block_size)
    cache = backend.allocate(shape.num_seqs * blocks)
    cache.storage.normal_()
    num_rows = shape.num_seqs * shape.rows
    q = torch.randn(num_rows, shape.kv_heads * shape.group, shape.head_dim, device=device)
    q = q.to(shape.dtype)
    order = torch.randperm(shape.num_seqs * blocks).view(shape.num_seqs, blocks)
    metadata = AttentionMetadata(
        query_start_loc=(torch.arange(shape.num_seqs + 1) * shape.rows).int().to(device),
        seq_lens=torch.full((shape.num_seqs,), shape.context).int().to(device),
        block_tables=order.int().to(device),
        slot_mapping=torch.full((num_rows,), -1, device=device),
        max_query_len=shape.rows,
        max_seq_len=shape.context,
    )
    return PagedStep(q, torch.empty_like(q), cache, metadata)
