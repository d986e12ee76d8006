"""How many KV blocks the memory of the device and of the host allows, and what steps need of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host_resources import THIS_MACHINE, HostMemory, Limit, host_memory
from octavo_kernels import KVCacheShape

logger = logging.getLogger(__name__)

_CPU_SHARE_OF_FREE_MEMORY = 0.25
_CPU_MAX_BYTES = 4 << 30
_SWAP_SHARE_OF_FREE_MEMORY = 0.1
_SWAP_MAX_BYTES = 4 << 30


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Run something; return how much memory of a GPU it took at most while it ran, 0 on a CPU.

    That is what it takes of the driver, with all that the allocator of torch keeps in reserve.
    """
    if device.type == "cpu":
        run()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    return torch.cuda.max_memory_reserved(device) - before


def free_bytes(device: torch.device) -> int:
    """Return how much memory nobody has, after giving back what torch keeps unused on a GPU.

    A GPU is waited for, as work under way holds memory.
    """
    if device.type == "cpu":
        return host_memory().free.amount
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def choose_num_blocks(
    config: EngineConfig,
    shape: KVCacheShape,
    device: torch.device,
    memory: HostMemory,
    reserved_bytes: int = 0,
) -> int:
    """Return the number of blocks to allocate; call it once weights are loaded.

    `num_kv_blocks` decides if given, then `kv_cache_memory_bytes`, then the free memory: on a GPU
    `gpu_memory_utilization` of it, on CPU a quarter of it and at most 4 GiB.

    Args:
        config: the options.
        shape: of the blocks.
        device: where they will be.
        memory: of the host.
        reserved_bytes: free memory of a GPU that steps will need.

    Raises:
        ConfigError: not even one block fits, or there is not so much memory.
    """
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        name = f"option num_kv_blocks is {num_blocks:,}, which in bytes"
        _check_fits(name, num_blocks * shape.bytes_per_block, _total(device, memory))
    else:
        memory_bytes = kv_memory_bytes(config, device, memory, reserved_bytes)
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


def kv_memory_bytes(
    config: EngineConfig, device: torch.device, memory: HostMemory, reserved_bytes: int = 0
) -> int:
    """Return the bytes that KV may take; the arguments are those of `choose_num_blocks`.

    Raises:
        ConfigError: there is not so much memory.
    """
    memory_bytes = config.kv_cache_memory_bytes or _default_memory_bytes(
        config, device, memory, reserved_bytes
    )
    _check_fits("option kv_cache_memory_bytes", memory_bytes, _total(device, memory))
    return memory_bytes


def choose_num_host_blocks(
    config: EngineConfig, shape: KVCacheShape, device: torch.device, memory: HostMemory
) -> int:
    """Return the number of host blocks to allocate for KV that leaves the device; may be 0.

    `swap_space_bytes` decides if given, else a tenth of the free memory and at most 4 GiB. On CPU
    there are none by default unless everything is to be swapped: a copy from memory to memory costs
    time, and the same bytes serve better as blocks of the cache.

    Raises:
        ConfigError: the host does not have so much memory, or it is to be used but holds no block.
    """
    swap_bytes = config.swap_space_bytes
    if swap_bytes is None and device.type == "cpu" and config.preemption_mode != "swap":
        return 0
    if swap_bytes is None:
        swap_bytes = min(int(memory.free.amount * _SWAP_SHARE_OF_FREE_MEMORY), _SWAP_MAX_BYTES)
    _check_fits("option swap_space_bytes", swap_bytes, memory.total)
    num_blocks = swap_bytes // shape.bytes_per_block
    if config.preemption_mode == "swap" and not num_blocks:
        raise ConfigError(
            f"option preemption_mode is 'swap' but the swap space is {swap_bytes:,} bytes and must "
            f"be at least the {shape.bytes_per_block:,} of one KV block; raise swap_space_bytes"
        )
    logger.info(
        "swap space: %s blocks, %.0f MiB of host memory",
        f"{num_blocks:,}",
        num_blocks * shape.bytes_per_block / 2**20,
    )
    return num_blocks


def _check_fits(what: str, num_bytes: int, total: Limit) -> None:
    if num_bytes > total.amount:
        raise ConfigError(
            f"{what} is {num_bytes:,} but must be at most the {total.amount:,} bytes of memory "
            f"that {total.source} has"
        )


def _total(device: torch.device, memory: HostMemory) -> Limit:
    if device.type == "cpu":
        return memory.total
    return Limit(int(torch.cuda.get_device_properties(device).total_memory), THIS_MACHINE)


def _default_memory_bytes(
    config: EngineConfig, device: torch.device, memory: HostMemory, reserved_bytes: int
) -> int:
    if device.type == "cpu":
        return min(int(memory.free.amount * _CPU_SHARE_OF_FREE_MEMORY), _CPU_MAX_BYTES)
    left_bytes = max(0, free_bytes(device) - reserved_bytes)
    return int(left_bytes * config.gpu_memory_utilization)
