"""How many blocks and sequences there is room for, once weights are loaded.

Knows nothing of where weights come from.
"""

from __future__ import annotations

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_storage import choose_num_blocks, free_bytes
from octavo.executor.parallel.part import share_of
from octavo.host_resources import HostMemory, Limit, host_memory
from octavo_kernels import KVCacheShape


def memory_left(device: torch.device, weight_bytes: int) -> HostMemory:
    """Return the host's memory as it is once so many bytes of weights are loaded.

    Raises:
        ConfigError: they do not fit into the free memory of their device.
    """
    memory = host_memory()
    free = memory.free.amount if device.type == "cpu" else free_bytes(device)
    if weight_bytes > free:
        raise ConfigError(
            f"the weights take {weight_bytes:,} bytes but only {free:,} of {device} are free"
        )
    if device.type != "cpu":
        return memory
    return HostMemory(memory.total, Limit(free - weight_bytes, memory.free.source))


def blocks_of_sequence(num_tokens: int, block_size: int, window: int | None) -> int:
    """Return the most blocks that a decoding sequence of up to so many tokens holds.

    Args:
        num_tokens: of the sequence.
        block_size: tokens in a block.
        window: how many last tokens any layer sees; None for all.
    """

    def held(length: int) -> int:
        unseen = 0 if window is None else max(0, length - window) // block_size
        return -(-length // block_size) - unseen

    return max(held(length) for length in range(max(1, num_tokens - block_size), num_tokens + 1))


def num_blocks(
    config: EngineConfig,
    shapes: tuple[KVCacheShape, ...],
    weight_bytes: tuple[int, ...],
    devices: tuple[torch.device, ...],
) -> int:
    """Return how many blocks every rank has room for.

    Args:
        config: the options.
        shapes: of each rank's blocks.
        weight_bytes: of each rank.
        devices: of each rank; those on a CPU share the machine's memory.

    Raises:
        ConfigError: the weights do not fit, or no block does.
    """
    found = []
    for shape, own_bytes, device in zip(shapes, weight_bytes, devices, strict=True):
        is_host = device.type == "cpu"
        memory = memory_left(device, sum(weight_bytes) if is_host else own_bytes)
        share = share_of(memory, len(devices)) if len(devices) > 1 else memory
        found.append(choose_num_blocks(config, shape, device, share, 0 if is_host else own_bytes))
    return min(found)
