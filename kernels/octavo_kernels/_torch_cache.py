"""A KV cache in plain tensors, as the backends share it that have no memory of their own kind.

Knows nothing of the order of dimensions inside a block.
"""

import torch

from octavo_kernels.attention import KVCache, KVCacheShape, check_copy


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
    """Copy whole blocks in order; see AttentionBackend.copy_blocks."""
    check_copy(source, target, pairs)
    for source_block, target_block in pairs.tolist():
        target.storage[target_block].copy_(source.storage[source_block], non_blocking=True)
