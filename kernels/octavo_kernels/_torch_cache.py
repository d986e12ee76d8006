"""A KV cache in plain tensors, as the backends share it that have no memory of their own kind.

Knows nothing of the order of dimensions inside a block.
"""

import torch

from octavo_kernels._attention_check import check_copy
from octavo_kernels._block_runs import STAGED_BLOCK_BYTES, copy_runs, copy_staged
from octavo_kernels.attention import KVCache, KVCacheShape


def allocate_in_torch(
    num_blocks: int,
    sizes: tuple[int, int, int],
    shape: KVCacheShape,
    device: torch.device,
    *,
    host: bool,
) -> KVCache:
    """Return a zero-filled cache whose blocks hold, for each layer, keys and values of `sizes`.

    With `host` it is on the host, pinned if `device` is a GPU, rather than on `device`.
    """
    storage = torch.zeros(
        (num_blocks, shape.num_layers, 2, *sizes),
        dtype=shape.dtype,
        device="cpu" if host else device,
        pin_memory=host and device.type == "cuda",
    )
    keys, values = storage.unbind(2)
    return KVCache(storage, keys.unbind(1), values.unbind(1))


def copy_in_torch(source: KVCache, target: KVCache, pairs: torch.Tensor) -> None:
    """Copy whole blocks in order, neighbours at once; see AttentionBackend.copy_blocks."""
    check_copy(source, target, pairs)
    listed = [(block, place) for block, place in pairs.tolist()]
    block_bytes = source.storage.stride(0) * source.storage.itemsize
    on_host = [cache.storage.device.type == "cpu" for cache in (source, target)]
    if on_host[0] == on_host[1] or block_bytes >= STAGED_BLOCK_BYTES:
        copy_runs(source.storage, target.storage, listed)
    else:
        copy_staged(source.storage, target.storage, listed, out=on_host[1])
