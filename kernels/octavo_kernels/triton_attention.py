"""Paged attention on NVIDIA GPUs by kernels in the Triton language.

The cache is [blocks, layers, keys and values, kv_heads, block_size, head_dim]: a block is one piece
for copies, and the positions of one head in it are one piece for who reads them.

Compiled for its targets and checked in the language's interpreter; nothing was measured on a GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch.compiler import is_compiling

from octavo_kernels._attention_check import check_kv, check_query, check_rope_and_write
from octavo_kernels._attention_launch import AttentionConfig, choose_attention
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import COMPILED_CAPABILITIES, Architecture, choose_apply_rope
from octavo_kernels._register import register
from octavo_kernels._torch_cache import allocate_in_torch, copy_in_torch
from octavo_kernels._triton.paged_attention import Layer, Rows, Scores, launch_paged_attention
from octavo_kernels._triton.rope_and_write_kv_cache import launch_rope_and_write_kv_cache
from octavo_kernels._triton.write_kv_cache import launch_write_kv_cache
from octavo_kernels.attention import AttentionMetadata, KVCache, KVCacheShape


class TritonAttention:
    """Attention backend of NVIDIA GPUs.

    Numbers in device memory are not checked, for reading them would make the host wait: a slot past
    the cache writes nowhere, and a block outside the cache reads as zeros.
    """

    name = "triton"
    recordable = True

    def __init__(
        self,
        shape: KVCacheShape,
        device: torch.device,
        config: AttentionConfig,
        num_processors: int,
    ) -> None:
        self.shape = shape
        self._device = device
        self._launch = (*astuple(config), num_processors)

    @staticmethod
    def supports(shape: KVCacheShape, capability: int) -> bool:
        """Say whether the kernels serve a cache of this shape on this architecture."""
        return capability >= 80 and shape.head_dim <= 256

    def allocate(self, num_blocks: int, *, host: bool = False) -> KVCache:
        """Return a zero-filled cache; see AttentionBackend."""
        shape = self.shape
        sizes = (shape.num_kv_heads, shape.block_size, shape.head_dim)
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
        keys, values = _layer_of(cache, layer)
        _write_kv_cache(k, v, keys, values, slot_mapping)

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
        keys, values = _layer_of(cache, layer)
        _rope_and_write_kv_cache(
            q, k, v, positions, cos_sin, keys, values, slot_mapping, q_out, interleaved
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
        keys, values = _layer_of(cache, layer)
        _paged_attention(
            q,
            keys,
            values,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.max_seq_len,
            scale,
            window,
            soft_cap,
            sinks,
            out,
            self._launch,
        )
        return out


def _layer_of(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer's keys and values, in a graph as views of the one tensor it takes."""
    if is_compiling():
        keys, values = cache.storage[:, layer].unbind(1)
        return keys, values
    return cache.keys[layer], cache.values[layer]


@register(
    "triton_write_kv_cache",
    "Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slot_mapping",
)
def _write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write checked keys and values into one layer of a cache."""
    launch_write_kv_cache(k, v, keys, values, slot_mapping)


@register(
    "triton_rope_and_write_kv_cache",
    "Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor slot_mapping, Tensor(c!) q_out, bool interleaved",
)
def _rope_and_write_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    interleaved: bool,
) -> None:
    """Rotate checked queries and keys, and write keys and values into one layer of a cache."""
    # None in the language's interpreter, where any architecture's table will do.
    capability = gpu_capability(q) or COMPILED_CAPABILITIES[0]
    launch_rope_and_write_kv_cache(
        (q, k, v, q_out),
        (keys, values),
        positions,
        cos_sin,
        slot_mapping,
        choose_apply_rope(cos_sin.shape[1] // 2, capability),
        interleaved=interleaved,
    )


@register(
    "triton_paged_attention",
    "Tensor q, Tensor keys, Tensor values, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor block_tables, SymInt max_seq_len, float scale, int? window, float? soft_cap, "
    "Tensor? sinks, Tensor(a!) out, int[] launch",
)
def _paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    launch: Sequence[int],
) -> None:
    """Attend from checked queries to one layer of a cache into `out`.

    `launch` is the fields of an AttentionConfig, then the GPU's multiprocessors.
    """
    *config, num_processors = launch
    launch_paged_attention(
        q,
        Layer(keys, values),
        Rows(query_start_loc, seq_lens, block_tables, max_seq_len),
        Scores(scale, window, soft_cap, sinks),
        _config(*config),
        out,
        num_processors=num_processors,
    )


@functools.cache
def _config(*fields: int) -> AttentionConfig:
    return AttentionConfig(*fields)


def make_triton_attention(
    shape: KVCacheShape, device: torch.device, capability: Architecture
) -> TritonAttention | None:
    """Return the backend of an NVIDIA GPU, or None where the plain one must serve."""
    if isinstance(capability, str) or not TritonAttention.supports(shape, capability):
        return None
    config = choose_attention(shape.head_dim, shape.dtype.itemsize, capability)
    properties = torch.cuda.get_device_properties(device)
    return TritonAttention(shape, device, config, properties.multi_processor_count)
