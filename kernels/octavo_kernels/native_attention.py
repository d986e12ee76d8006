"""Paged attention on the CPU by native code over a packed cache.

The cache is [blocks, layers, keys and values, kv_heads, ...]. In lanes (one float32, one float16,
or two bfloat16 side by side) the keys of a head are [head_dim, block_size] and its values
[block_size, head_dim], where a bfloat16 lane of keys holds two neighbouring dimensions of one
position and a lane of values two neighbouring positions of one dimension: hence odd head sizes in
bfloat16 are left to the reference. Knows nothing of how the native code is built.
"""

import ctypes
import mmap

import torch

from octavo_kernels._native.library import (
    element_code,
    load_library,
    native_instructions,
    strides_of,
)
from octavo_kernels._native.processor import InstructionSet
from octavo_kernels.attention import (
    AttentionMetadata,
    KVCache,
    KVCacheShape,
    check_copy,
    check_kv,
    check_query,
    metadata_error,
)

_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_MAX_HEAD_DIM = 256
_SLACK_BYTES = 64  # native loads of values may run this far past the last one


class _CacheShape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in "element kv_heads head_dim block_size num_blocks block_stride".split()
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")],
        *[(name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "num_tokens")],
    ]


class NativeAttention:
    """Attention backend of the CPU where a C++ compiler is at hand."""

    recordable = False

    def __init__(self, shape: KVCacheShape, instructions: InstructionSet) -> None:
        self.name = f"native ({instructions.name})"
        self.shape = shape
        self._library = load_library(instructions)

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
        self._library.octavo_copy_blocks(
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
        invalid = self._library.octavo_write_kv_cache(
            self._native_shape(cache),
            *(k.data_ptr(), v.data_ptr()),
            *(cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()),
            *(slot_mapping.data_ptr(), k.shape[0]),
            strides_of(k.stride(0), v.stride(0)),
            torch.get_num_threads(),
        )
        if invalid >= 0:
            raise IndexError(
                f"write_kv_cache: slot {int(slot_mapping[invalid])} is past the cache of "
                f"{cache.num_blocks} blocks of {self.shape.block_size}"
            )

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
        out = check_query(self.shape, q, window, out, soft_cap, sinks)
        num_tokens, q_heads, _ = q.shape
        invalid = self._library.octavo_paged_attention(
            self._native_shape(cache),
            ctypes.byref(
                _Batch(
                    metadata.query_start_loc.data_ptr(),
                    metadata.seq_lens.data_ptr(),
                    metadata.block_tables.data_ptr(),
                    *metadata.block_tables.shape,
                    num_tokens,
                )
            ),
            *(q.data_ptr(), out.data_ptr()),
            *(cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()),
            None if sinks is None else sinks.data_ptr(),
            q_heads // self.shape.num_kv_heads,
            strides_of(q.stride(0), out.stride(0)),
            *(scale, soft_cap or 0.0, window or 0),
            torch.get_num_threads(),
        )
        if invalid >= 0:
            raise metadata_error(invalid, num_tokens, cache.num_blocks)
        return out

    def _native_shape(self, cache: KVCache) -> "ctypes._CArgObject":
        shape = self.shape
        return ctypes.byref(
            _CacheShape(
                element_code(shape.dtype),
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                cache.num_blocks,
                cache.storage.stride(0),
            )
        )

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        elements = torch.Size(shape).numel()
        dtype = self.shape.dtype
        # Mapped memory is zero, and takes room only once it is written: a large cache that is
        # never filled costs nothing, and a model is ready sooner.
        memory = mmap.mmap(
            -1, elements * dtype.itemsize + _SLACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        return torch.frombuffer(memory, dtype=dtype)[:elements].view(shape)


def _per_lane(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


def make_native_attention(shape: KVCacheShape) -> NativeAttention | None:
    """Return the native backend, or None where the plain one must serve."""
    if not NativeAttention.supports(shape):
        return None
    instructions = native_instructions()
    return None if instructions is None else NativeAttention(shape, instructions)
