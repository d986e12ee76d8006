"""Paged attention in plain torch: the reference, and the path of devices without native code.

The cache is [blocks, layers, keys and values, block_size, kv_heads, head_dim]. Knows nothing of how
other backends lay theirs out.
"""

import torch

from octavo_kernels._attention_check import check_kv, check_query, slot_error
from octavo_kernels._register import register
from octavo_kernels._torch_attention import Rows, Softmax, attend_placed, place
from octavo_kernels._torch_cache import allocate_in_torch, copy_in_torch
from octavo_kernels.apply_rope import apply_rope
from octavo_kernels.attention import AttentionMetadata, KVCache, KVCacheShape


@register(
    "reference_write_kv_cache",
    "Tensor k, Tensor v, Tensor(a!) storage, int layer, Tensor slot_mapping",
)
def _write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Write checked keys and values into one layer of a cache's storage."""
    num_blocks, size = len(storage), storage.shape[3]
    inside = slot_mapping < num_blocks * size
    # A GPU is not waited for: there such a slot writes nowhere.
    if storage.device.type == "cpu" and not bool(inside.all()):
        raise slot_error("write_kv_cache", int(slot_mapping.max()), num_blocks, size)
    kept = inside & (slot_mapping >= 0)
    slots = slot_mapping[kept]
    keys, values = storage[:, layer].unbind(1)
    keys[slots // size, slots % size] = k[kept]
    values[slots // size, slots % size] = v[kept]


ATTEND_ARGUMENTS = (
    "Tensor q, Tensor storage, int layer, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor block_tables, float scale, int? window, float? soft_cap, Tensor? sinks, Tensor(a!) out"
)
"""Of an operation that attends to a cache in torch."""


@register("reference_paged_attention", ATTEND_ARGUMENTS)
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
    step = Rows(query_start_loc, seq_lens, block_tables)
    for placed in place(step, window, len(q), len(storage), storage.shape[3]):
        out[placed.rows] = attend_placed(q, keys, values, placed, softmax)


class ReferenceAttention:
    """Attention backend in torch operations, float32 inside, one sequence after the other."""

    name = "reference"
    recordable = False
    _attend = staticmethod(_paged_attention)

    def __init__(self, shape: KVCacheShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device

    def allocate(self, num_blocks: int, *, host: bool = False) -> KVCache:
        """Return a zero-filled cache; see AttentionBackend."""
        shape = self.shape
        sizes = (shape.block_size, shape.num_kv_heads, shape.head_dim)
        return allocate_in_torch(num_blocks, sizes, shape, self._device, host=host)

    def copy_blocks(self, source: KVCache, target: KVCache, pairs: torch.Tensor) -> None:
        """Copy whole blocks in order; see AttentionBackend."""
        copy_in_torch(source, target, pairs)

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
        _write_kv_cache(k, v, cache.storage, layer, slot_mapping)

    def rope_and_write_kv_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: KVCache,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        q_out: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate queries and keys, then write keys and values; see AttentionBackend."""
        check_kv(self.shape, k, v, slot_mapping)
        q_out, k = apply_rope(q, k, positions, cos_sin, q_out=q_out, interleaved=interleaved)
        self.write_kv_cache(k, v, cache, layer, slot_mapping)
        return q_out

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each row to its sequence; see AttentionBackend."""
        out = check_query(self.shape, q, metadata, window, out, soft_cap, sinks)
        self._attend(
            q,
            cache.storage,
            layer,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            scale,
            window,
            soft_cap,
            sinks,
            out,
        )
        return out
