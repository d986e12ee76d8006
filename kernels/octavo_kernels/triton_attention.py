"""Paged attention on NVIDIA GPUs by kernels in the Triton language.

The cache is [blocks, layers, keys and values, kv_heads, block_size, head_dim]: a block is one piece
for copies, and the positions of one head in it are one piece for who reads them.

Compiled for its targets and checked in the language's interpreter; nothing was measured on a GPU.
"""

import torch

from octavo_kernels._attention_check import check_kv, check_query
from octavo_kernels._attention_launch import AttentionConfig, choose_attention
from octavo_kernels._torch_cache import allocate_in_torch, copy_in_torch
from octavo_kernels._triton.paged_attention import Layer, Scores, launch_paged_attention
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
        self._config = config
        self._num_processors = num_processors

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
        check_kv("write_kv_cache", self.shape, k, v, slot_mapping)
        launch_write_kv_cache(k, v, cache.keys[layer], cache.values[layer], slot_mapping)

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
        launch_paged_attention(
            q,
            Layer(cache.keys[layer], cache.values[layer]),
            metadata,
            Scores(scale, window, soft_cap, sinks),
            self._config,
            out,
            num_processors=self._num_processors,
        )
        return out


def make_triton_attention(
    shape: KVCacheShape, device: torch.device, capability: int
) -> TritonAttention | None:
    """Return the backend of an NVIDIA GPU, or None where the plain one must serve."""
    if torch.version.hip is not None or not TritonAttention.supports(shape, capability):
        return None
    config = choose_attention(shape.head_dim, shape.dtype.itemsize, capability)
    properties = torch.cuda.get_device_properties(device)
    return TritonAttention(shape, device, config, properties.multi_processor_count)
