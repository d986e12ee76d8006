"""Sequences of random queries, keys and values, attended to in a paged cache in any way asked for.

Knows the interface of attention backends, and none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo_kernels import AttentionBackend, AttentionMetadata, KVCacheShape

BackendMaker = Callable[[KVCacheShape, torch.device], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Share:
    """The last rows of a sequence that is cut to a length."""

    sequence: int
    length: int
    rows: int


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of whole sequences, on the CPU, and how they attend."""

    q: tuple[torch.Tensor, ...]
    """[length, q_heads, head_dim] each."""
    k: tuple[torch.Tensor, ...]
    """[length, kv_heads, head_dim] each."""
    v: tuple[torch.Tensor, ...]
    device: torch.device
    make_backend: BackendMaker
    block_size: int = 16
    launched_for: int = 0
    """Longest context that a launch must serve, if longer than any of the step's."""
    options: dict[str, Any] = field(default_factory=dict)
    """`window`, `soft_cap` and `sinks`, as paged_attention takes them."""

    def attend(self, shares: Iterable[Share]) -> list[torch.Tensor]:
        """Return the rows of each share, computed in one step; unused memory holds NaN."""
        shares = list(shares)
        _, kv_heads, head_dim = self.k[0].shape
        shape = KVCacheShape(1, kv_heads, head_dim, self.block_size, self.k[0].dtype)
        backend = self.make_backend(shape, self.device)
        counts = [-(-share.length // self.block_size) for share in shares]
        cache = backend.allocate(sum(counts) + 1)
        cache.storage.fill_(math.nan)
        order = torch.randperm(sum(counts) + 1)
        tables = torch.zeros(len(shares), max(counts), dtype=torch.int64)
        for table, own in zip(tables, torch.split(order, [*counts, 1]), strict=False):
            table[: len(own)] = own
        metadata = self._metadata(shares, tables)
        k = torch.cat([self.k[share.sequence][: share.length] for share in shares])
        v = torch.cat([self.v[share.sequence][: share.length] for share in shares])
        q = torch.cat([self.q[x.sequence][x.length - x.rows : x.length] for x in shares])
        k, v, q = (x.to(self.device) for x in (k, v, q))
        backend.write_kv_cache(k, v, cache, 0, metadata.slot_mapping)
        options: dict[str, Any] = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.options.items()
        }
        scale = head_dim**-0.5
        out = backend.paged_attention(q, cache, 0, metadata, scale=scale, **options)
        return list(torch.split(out.cpu(), [share.rows for share in shares]))

    def _metadata(self, shares: list[Share], tables: torch.Tensor) -> AttentionMetadata:
        slots = []
        for share, table in zip(shares, tables, strict=True):
            at = torch.arange(share.length)
            slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
        rows, lengths = [x.rows for x in shares], [x.length for x in shares]
        return AttentionMetadata(
            torch.tensor([0, *rows]).cumsum(0).int().to(self.device),
            torch.tensor(lengths).int().to(self.device),
            tables.int().to(self.device),
            torch.cat(slots).to(self.device),
            max(rows),
            max([*lengths, self.launched_for]),
        )

    def expected(self, share: Share) -> torch.Tensor:
        """Return a share's rows by a dense softmax in float64."""
        group = self.q[0].shape[1] // self.k[0].shape[1]
        k, v = (x[share.sequence][: share.length].double() for x in (self.k, self.v))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        first = share.length - share.rows
        q = self.q[share.sequence][first : share.length].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        cap, window, sinks = map(self.options.get, ("soft_cap", "window", "sinks"))
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        own, at = torch.arange(first, share.length)[:, None], torch.arange(share.length)
        seen = (at <= own) & (at > own - (window or share.length))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            rest = sinks.double()[:, None, None].expand(-1, share.rows, 1)
            scores = torch.cat([scores, rest], dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : share.length], v)


def draw_sequences(
    lengths: Iterable[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    make_backend: BackendMaker,
    **options: Any,
) -> Sequences:
    """Draw sequences; `heads` are KV heads, query heads for each of them, and head size."""
    kv_heads, group, head_dim = heads
    lengths = tuple(lengths)

    def draw(num_heads: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(n, num_heads, head_dim).to(dtype) for n in lengths)

    q, k, v = draw(kv_heads * group), draw(kv_heads), draw(kv_heads)
    return Sequences(q, k, v, device, make_backend, options=options)
