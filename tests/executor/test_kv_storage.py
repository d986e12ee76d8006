"""How many blocks the options and the memory of the host give."""

from __future__ import annotations

import psutil
import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_storage import (
    choose_num_blocks,
    choose_num_host_blocks,
    free_bytes,
    peak_bytes,
)
from octavo_kernels import KVCacheShape

#: A block of 2 MiB.
SHAPE = KVCacheShape(num_layers=4, num_kv_heads=8, head_dim=512, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("swap_space_bytes", "num_blocks"),
    [(0, 0), ((2 << 20) - 1, 0), (2 << 20, 1), ((64 << 20) + 5, 32)],
)
def test_the_swap_space_holds_whole_blocks(swap_space_bytes, num_blocks):
    config = EngineConfig("model", swap_space_bytes=swap_space_bytes)
    assert choose_num_host_blocks(config, SHAPE) == num_blocks


def test_by_default_the_swap_space_is_a_tenth_of_free_memory_and_at_most_4_gib():
    num_blocks = choose_num_host_blocks(EngineConfig("model"), SHAPE)
    tenth = psutil.virtual_memory().total // 10 // SHAPE.bytes_per_block
    assert 0 < num_blocks <= min(tenth, (4 << 30) // SHAPE.bytes_per_block)


def test_more_swap_space_than_memory_is_refused():
    total = psutil.virtual_memory().total
    config = EngineConfig("model", swap_space_bytes=total + 1)
    with pytest.raises(ConfigError) as caught:
        choose_num_host_blocks(config, SHAPE)
    assert str(caught.value) == (
        f"option swap_space_bytes is {total + 1:,} but must be at most the {total:,} bytes of "
        "memory that this machine has"
    )


def test_swapping_needs_swap_space_for_a_block():
    size = SHAPE.bytes_per_block
    config = EngineConfig("model", preemption_mode="swap", swap_space_bytes=size - 1)
    with pytest.raises(
        ConfigError,
        match=rf"^option preemption_mode is 'swap' but the swap space is {size - 1:,} bytes and "
        rf"must be at least the {size:,} of one KV block; raise swap_space_bytes$",
    ):
        choose_num_host_blocks(config, SHAPE)
    config = EngineConfig("model", preemption_mode="swap", swap_space_bytes=size)
    assert choose_num_host_blocks(config, SHAPE) == 1


@pytest.mark.parametrize("name", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_a_kv_cache_larger_than_memory_is_refused_by_the_name_of_its_option(name):
    total = psutil.virtual_memory().total
    value = total // SHAPE.bytes_per_block + 1 if name == "num_kv_blocks" else total + 1
    with pytest.raises(ConfigError, match=rf"^option {name} is .* at most the {total:,} bytes of"):
        choose_num_blocks(EngineConfig("model", **{name: value}), SHAPE, torch.device("cpu"))


def test_a_kv_cache_too_small_for_one_block_is_refused():
    config = EngineConfig("model", kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="1,000 bytes for the KV cache hold no block of"):
        choose_num_blocks(config, SHAPE, torch.device("cpu"))


def test_on_a_cpu_steps_run_and_need_no_memory_set_aside():
    runs = []
    assert peak_bytes(torch.device("cpu"), lambda: runs.append(1)) == 0
    assert runs == [1]
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total
    config = EngineConfig("model", kv_cache_memory_bytes=5 * SHAPE.bytes_per_block)
    assert choose_num_blocks(config, SHAPE, torch.device("cpu"), reserved_bytes=1 << 50) == 5
