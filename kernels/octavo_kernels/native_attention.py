"""Paged attention on the CPU by native code over a packed cache.

The cache is [blocks, layers, keys and values, kv_heads, ...]. In lanes (one float32, one float16,
or two bfloat16 side by side) the keys of a head are [head_dim, block_size] and its values
[block_size, head_dim], where a bfloat16 lane of keys holds two neighbouring dimensions of one
position and a lane of values two neighbouring positions of one dimension: hence odd head sizes in
bfloat16 are left to another backend. Knows nothing of how the native code is built.
"""

import contextlib
import mmap

import torch

from octavo_kernels._attention_check import (
    check_copy,
    check_kv,
    check_query,
    check_rope_and_write,
)
from octavo_kernels._native.attention import (
    library_named,
    paged_attention,
    rope_and_write_kv_cache,
    write_kv_cache,
)
from octavo_kernels._native.library import load_library, native_instructions
from octavo_kernels._native.processor import InstructionSet
from octavo_kernels.attention import AttentionMetadata, KVCache, KVCacheShape

_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_MAX_HEAD_DIM = 256


class NativeAttention:
    """Attention backend of the CPU where a C++ compiler is at hand."""

    recordable = False

    def __init__(self, shape: KVCacheShape, instructions: InstructionSet) -> None:
        self.name = f"native ({instructions.name})"
        self.shape = shape
        self._instructions = instructions.name
        load_library(instructions)

    @staticmethod
    def supports(shape: KVCacheShape) -> bool:
        """Say whether native code serves a cache of this shape."""
        return (
            shape.block_size in _BLOCK_SIZES
            and shape.head_dim <= _MAX_HEAD_DIM
            and shape.head_dim % _per_lane(shape.dtype) == 0
        )

    def allocate(self, num_blocks: int, *, host: bool = False) -> KVCache:
        """Return a zero-filled cache; see AttentionBackend."""
        shape = self.shape
        per_lane = _per_lane(shape.dtype)
        heads, depth, size = shape.num_kv_heads, shape.head_dim, shape.block_size
        keys_shape = (num_blocks, heads, depth // per_lane, size, per_lane)
        values_shape = (num_blocks, heads, size // per_lane, depth, per_lane)
        storage = self._zeros((num_blocks, shape.num_layers, 2, heads, depth * size))
        keys, values = storage.unbind(2)
        return KVCache(
            storage,
            tuple(layer.view(keys_shape) for layer in keys.unbind(1)),
            tuple(layer.view(values_shape) for layer in values.unbind(1)),
        )

    def copy_blocks(self, source: KVCache, target: KVCache, pairs: torch.Tensor) -> None:
        """Copy whole blocks in order; see AttentionBackend."""
        check_copy(source, target, pairs)
        library_named(self._instructions).octavo_copy_blocks(
            *(source.storage.data_ptr(), target.storage.data_ptr()),
            *(pairs.data_ptr(), len(pairs)),
            self.shape.bytes_per_block,
            torch.get_num_threads(),
        )

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
        write_kv_cache(k, v, cache.storage, layer, slot_mapping, self._instructions)

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
        """Rotate queries and keys and write keys and values; see AttentionBackend."""
        q_out = check_rope_and_write(self.shape, (q, k, v), positions, cos_sin, slot_mapping, q_out)
        rope_and_write_kv_cache(
            q,
            k,
            v,
            positions,
            cos_sin,
            cache.storage,
            layer,
            slot_mapping,
            q_out,
            interleaved,
            self._instructions,
        )
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
        paged_attention(
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
            self._instructions,
        )
        return out

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        elements = torch.Size(shape).numel()
        dtype = self.shape.dtype
        # Mapped memory is zero, and takes room only once it is written: a large cache that is
        # never filled costs nothing, and a model is ready sooner.
        memory = mmap.mmap(
            -1, max(1, elements) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # Blocks are scattered, and with small pages nearly each would be an address to look up. A
        # system without large ones refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype)[:elements].view(shape)


def _per_lane(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


def make_native_attention(shape: KVCacheShape) -> NativeAttention | None:
    """Return the native backend, or None where the plain one must serve."""
    if not NativeAttention.supports(shape):
        return None
    instructions = native_instructions()
    return None if instructions is None else NativeAttention(shape, instructions)
