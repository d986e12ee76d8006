"""How many blocks the options and the memory of the host give."""

from __future__ import annotations

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_storage import (
    choose_num_blocks,
    choose_num_host_blocks,
    peak_bytes,
)
from octavo.host_resources import THIS_MACHINE, HostMemory, Limit
from octavo_kernels import KVCacheShape

GIB = 2**30
CPU = torch.device("cpu")
#: Whole and free memory of a host.
MEMORY = HostMemory(Limit(8 * GIB, THIS_MACHINE), Limit(6 * GIB, THIS_MACHINE))
#: A block of 2 MiB.
SHAPE = KVCacheShape(num_layers=4, num_kv_heads=8, head_dim=512, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("swap_space_bytes", "num_blocks"),
    [(0, 0), ((2 << 20) - 1, 0), (2 << 20, 1), ((64 << 20) + 5, 32)],
)
def test_the_swap_space_holds_whole_blocks(swap_space_bytes, num_blocks):
    config = EngineConfig("model", swap_space_bytes=swap_space_bytes)
    assert choose_num_host_blocks(config, SHAPE, CPU, MEMORY) == num_blocks


@pytest.mark.parametrize(
    ("free_bytes", "num_swap_blocks", "num_kv_blocks"),
    [(0, 0, None), (20 << 20, 1, 2), (6 * GIB, 307, 768), (100 * GIB, 2048, 2048)],
)
def test_by_default_a_tenth_of_free_memory_is_for_swapping_and_a_quarter_for_kv_to_4_gib_each(
    free_bytes, num_swap_blocks, num_kv_blocks
):
    config = EngineConfig("model")
    memory = HostMemory(Limit(200 * GIB, THIS_MACHINE), Limit(free_bytes, THIS_MACHINE))
    assert choose_num_host_blocks(config, SHAPE, torch.device("cuda"), memory) == num_swap_blocks
    if num_kv_blocks is None:
        with pytest.raises(ConfigError, match=r"^0 bytes for the KV cache hold no block"):
            choose_num_blocks(config, SHAPE, CPU, memory)
    else:
        assert choose_num_blocks(config, SHAPE, CPU, memory) == num_kv_blocks


def test_on_a_cpu_nothing_is_swapped_by_default_unless_all_is():
    """There KV would only move from memory to memory, which costs more than it saves."""
    assert choose_num_host_blocks(EngineConfig("model"), SHAPE, CPU, MEMORY) == 0
    swapping = EngineConfig("model", preemption_mode="swap")
    assert choose_num_host_blocks(swapping, SHAPE, CPU, MEMORY) == 307


@pytest.mark.parametrize("source", [THIS_MACHINE, "this control group (/memory.max)"])
def test_more_swap_space_than_memory_is_refused(source):
    memory = HostMemory(Limit(8 * GIB, source), Limit(6 * GIB, THIS_MACHINE))
    config = EngineConfig("model", swap_space_bytes=8 * GIB + 1)
    with pytest.raises(ConfigError) as caught:
        choose_num_host_blocks(config, SHAPE, CPU, memory)
    assert str(caught.value) == (
        "option swap_space_bytes is 8,589,934,593 but must be at most the 8,589,934,592 bytes of "
        f"memory that {source} has"
    )


def test_swapping_needs_swap_space_for_a_block():
    size = SHAPE.bytes_per_block
    config = EngineConfig("model", preemption_mode="swap", swap_space_bytes=size - 1)
    with pytest.raises(
        ConfigError,
        match=rf"^option preemption_mode is 'swap' but the swap space is {size - 1:,} bytes and "
        rf"must be at least the {size:,} of one KV block; raise swap_space_bytes$",
    ):
        choose_num_host_blocks(config, SHAPE, CPU, MEMORY)
    config = EngineConfig("model", preemption_mode="swap", swap_space_bytes=size)
    assert choose_num_host_blocks(config, SHAPE, CPU, MEMORY) == 1


@pytest.mark.parametrize("name", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_a_kv_cache_larger_than_memory_is_refused_by_the_name_of_its_option(name):
    total = 8 * GIB
    value = total // SHAPE.bytes_per_block + 1 if name == "num_kv_blocks" else total + 1
    with pytest.raises(ConfigError, match=rf"^option {name} is .* at most the {total:,} bytes of"):
        choose_num_blocks(EngineConfig("model", **{name: value}), SHAPE, CPU, MEMORY)


def test_a_kv_cache_too_small_for_one_block_is_refused():
    config = EngineConfig("model", kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="1,000 bytes for the KV cache hold no block of"):
        choose_num_blocks(config, SHAPE, CPU, MEMORY)


def test_on_a_cpu_steps_run_and_need_no_memory_set_aside():
    runs = []
    assert peak_bytes(CPU, lambda: runs.append(1)) == 0
    assert runs == [1]
    config = EngineConfig("model", kv_cache_memory_bytes=5 * SHAPE.bytes_per_block)
    assert choose_num_blocks(config, SHAPE, CPU, MEMORY, reserved_bytes=1 << 50) == 5
