"""The operations of the native attention backend: checked tensors in, native calls out.

A cache is its storage, [blocks, layers, keys and values, kv_heads, head_dim * block_size], and a
library the name of its instruction set: what a compiled graph can hold.
"""

import ctypes
import functools
from typing import NamedTuple

import torch

from octavo_kernels._attention_check import metadata_error, slot_error
from octavo_kernels._native.library import element_code, load_library, strides_of
from octavo_kernels._native.processor import INSTRUCTION_SETS
from octavo_kernels._register import register
from octavo_kernels.apply_rope import position_error


class CacheShape(ctypes.Structure):
    """As in kv_cache.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in "element kv_heads head_dim block_size num_blocks block_stride".split()
    ]


class Batch(ctypes.Structure):
    """As in operations.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")],
        *[(name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "num_tokens")],
    ]


@register(
    "native_write_kv_cache",
    "Tensor k, Tensor v, Tensor(a!) storage, int layer, Tensor slot_mapping, str instructions",
)
def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    instructions: str,
) -> None:
    """Write checked keys and values into one layer of a cache's storage."""
    shape, keys, values = _layer_of(storage, layer, k.shape[2])
    invalid = library_named(instructions).octavo_write_kv_cache(
        shape,
        *(k.data_ptr(), v.data_ptr()),
        keys,
        values,
        *(slot_mapping.data_ptr(), k.shape[0]),
        strides_of(k.stride(0), v.stride(0)),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        slot, block_size = int(slot_mapping[invalid]), storage.shape[4] // k.shape[2]
        raise slot_error("write_kv_cache", slot, len(storage), block_size)


@register(
    "native_rope_and_write_kv_cache",
    "Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor(a!) storage, "
    "int layer, Tensor slot_mapping, Tensor(b!) q_out, bool interleaved, str instructions",
)
def rope_and_write_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    storage: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    interleaved: bool,
    instructions: str,
) -> None:
    """Rotate checked queries and keys, and write keys and values into one layer of a storage."""
    num_tokens, q_heads, head_dim = q.shape
    max_len, rotary_dim = cos_sin.shape
    shape, keys, values = _layer_of(storage, layer, head_dim)
    invalid = library_named(instructions).octavo_rope_and_write_kv_cache(
        shape,
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), q_out.data_ptr()),
        keys,
        values,
        *(positions.data_ptr(), cos_sin.data_ptr(), slot_mapping.data_ptr()),
        *(num_tokens, q_heads, rotary_dim, max_len, interleaved),
        strides_of(q.stride(0), q_out.stride(0), k.stride(0), v.stride(0)),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise write_error(positions, slot_mapping, invalid, max_len, storage, head_dim)


@register(
    "native_paged_attention",
    "Tensor q, Tensor storage, int layer, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor block_tables, float scale, int? window, float? soft_cap, Tensor? sinks, "
    "Tensor(a!) out, str instructions",
)
def paged_attention(
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
    instructions: str,
) -> None:
    """Attend from checked queries to one layer of a cache's storage into `out`."""
    num_tokens, q_heads, head_dim = q.shape
    shape, keys, values = _layer_of(storage, layer, head_dim)
    invalid = library_named(instructions).octavo_paged_attention(
        shape,
        ctypes.byref(batch_of(query_start_loc, seq_lens, block_tables, num_tokens)),
        *(q.data_ptr(), out.data_ptr()),
        keys,
        values,
        None if sinks is None else sinks.data_ptr(),
        q_heads // storage.shape[3],
        strides_of(q.stride(0), out.stride(0)),
        *(scale, soft_cap or 0.0, window or 0),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise metadata_error(invalid, num_tokens, len(storage))


@functools.cache
def library_named(instructions: str) -> ctypes.CDLL:
    """Return the native library by the name of its instruction set, which a graph can hold."""
    return load_library(next(x for x in INSTRUCTION_SETS if x.name == instructions))


class _Layout(NamedTuple):
    """How a cache lies in memory."""

    shape: CacheShape
    num_layers: int
    layer_bytes: int
    """From one layer of a block to the next."""
    kind_bytes: int
    """From a layer's keys to its values."""


# Looked up, for to make one each time costs a microsecond a call, and a process has few caches.
@functools.lru_cache(maxsize=32)
def _layout(sizes: torch.Size, dtype: torch.dtype, head_dim: int) -> _Layout:
    num_blocks, num_layers, kinds, kv_heads, elements = sizes
    kind = kv_heads * elements
    shape = CacheShape(
        element_code(dtype),
        *(kv_heads, head_dim, elements // head_dim, num_blocks, num_layers * kinds * kind),
    )
    return _Layout(shape, num_layers, kinds * kind * dtype.itemsize, kind * dtype.itemsize)


def cache_shape(storage: torch.Tensor, head_dim: int) -> CacheShape:
    """Return the shape of a cache as native code takes it, not to be changed."""
    return _layout(storage.shape, storage.dtype, head_dim).shape


def _layer_of(
    storage: torch.Tensor, layer: int, head_dim: int
) -> tuple["ctypes._CArgObject", int, int]:
    """Return the shape of a cache, and where the keys and the values of one layer begin."""
    layout = _layout(storage.shape, storage.dtype, head_dim)
    if not 0 <= layer < layout.num_layers:
        raise IndexError(f"layer is {layer} but the cache has {layout.num_layers}")
    keys = storage.data_ptr() + layer * layout.layer_bytes
    return ctypes.byref(layout.shape), keys, keys + layout.kind_bytes


def batch_of(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_tokens: int,
) -> Batch:
    """Return a step's sequences as native code takes them; keeps no tensor alive."""
    return Batch(
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        *block_tables.shape,
        num_tokens,
    )


def write_error(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    invalid: int,
    max_len: int,
    storage: torch.Tensor,
    head_dim: int,
) -> IndexError:
    """Return the error of a token whose position or slot is outside."""
    name, position = "rope_and_write_kv_cache", int(positions[invalid])
    if not 0 <= position < max_len:
        return position_error(name, position, max_len)
    block_size = storage.shape[4] // head_dim
    return slot_error(name, int(slot_mapping[invalid]), len(storage), block_size)
