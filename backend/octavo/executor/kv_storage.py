"""How many KV blocks the device's memory allows."""

from __future__ import annotations

import logging

import psutil
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo_kernels import KVCacheShape

logger = logging.getLogger(__name__)

_CPU_SHARE_OF_FREE_MEMORY = 0.25
_CPU_MAX_BYTES = 4 << 30


def choose_num_blocks(config: EngineConfig, shape: KVCacheShape, device: torch.device) -> int:
    """Return the number of blocks to allocate; call it after weights and a profiling run.

    `num_kv_blocks` decides if given, then `kv_cache_memory_bytes`, then the free memory: on a GPU
    `gpu_memory_utilization` of it, on CPU a quarter of it and at most 4 GiB.

    Raises:
        ConfigError: not even one block fits.
    """
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        memory_bytes = config.kv_cache_memory_bytes or _default_memory_bytes(config, device)
        num_blocks = memory_bytes // shape.bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"{memory_bytes:,} bytes for the KV cache hold no block of "
                f"{shape.bytes_per_block:,} bytes; raise kv_cache_memory_bytes"
            )
    logger.info(
        "KV cache: %s blocks of %d tokens, %.0f MiB on %s",
        f"{num_blocks:,}",
        shape.block_size,
        num_blocks * shape.bytes_per_block / 2**20,
        device,
    )
    return num_blocks


def _default_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cpu":
        free_bytes = psutil.virtual_memory().available
        return min(int(free_bytes * _CPU_SHARE_OF_FREE_MEMORY), _CPU_MAX_BYTES)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * config.gpu_memory_utilization)
