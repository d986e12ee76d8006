"""How the kernels on logits are launched follows from tables alone."""

import pytest

from octavo_kernels._launch import COMPILED_ARCHITECTURES
from octavo_kernels._sampling_launch import (
    choose_bitmask,
    choose_penalties,
    choose_row_scan,
    choose_sample,
)

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.parametrize("architecture", COMPILED_ARCHITECTURES),
]


def test_every_size_is_a_power_of_two_as_the_language_wants(architecture):
    sizes = [choose_sample(architecture).max_listed]
    for choose in (choose_row_scan, choose_sample, choose_penalties, choose_bitmask):
        sizes += [choose(architecture).block_size, choose(architecture).num_warps]
    assert [size for size in sizes if size < 1 or size & (size - 1)] == []


def test_the_list_of_a_row_holds_the_best_of_each_lane(architecture):
    config = choose_sample(architecture)
    assert config.max_listed >= config.block_size


def test_a_bitmask_is_read_by_whole_words(architecture):
    assert choose_bitmask(architecture).block_size % 32 == 0
