"""How attention on a GPU is launched: pure choices."""

import pytest

from octavo_kernels._attention_launch import (
    AttentionConfig,
    attention_configs,
    choose_attention,
    choose_lanes,
    num_query_blocks,
    rows_for,
)
from octavo_kernels._launch import COMPILED_ARCHITECTURES

pytestmark = pytest.mark.kernels

CONFIG = AttentionConfig(
    rows=64, tile=32, split=512, num_warps=4, num_stages=3, programs_per_processor=2
)


@pytest.mark.parametrize("capability", [*COMPILED_ARCHITECTURES, 120])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_configuration_is_one_that_the_kernel_takes(element_bytes, capability):
    for config in attention_configs(element_bytes, capability).values():
        for size in (config.rows, config.tile, config.num_warps):
            assert size & (size - 1) == 0
        assert config.rows >= 16
        assert config.tile >= 16
        assert config.split % config.tile == 0


@pytest.mark.parametrize(("head_dim", "longest"), [(1, 64), (64, 64), (65, 128), (256, 256)])
def test_a_head_gets_the_configuration_of_the_shortest_that_holds_it(head_dim, longest):
    expected = attention_configs(2, 90)[longest]
    assert choose_attention(head_dim, 2, 90) == expected


def test_what_no_kernel_serves_is_refused():
    with pytest.raises(ValueError, match="head_dim is 257 but may be at most 256 on a GPU"):
        choose_attention(257, 2, 90)
    with pytest.raises(ValueError, match="capability is 75 but must be at least 80"):
        choose_attention(64, 2, 75)
    with pytest.raises(ValueError, match="129 query heads share a KV head but 128 may on a GPU"):
        rows_for(CONFIG, 129)


@pytest.mark.parametrize(("group", "rows"), [(1, 64), (3, 64), (64, 64), (65, 128), (128, 128)])
def test_a_program_holds_at_least_one_group(group, rows):
    assert rows_for(CONFIG, group) == rows


def test_query_blocks_are_enough_for_any_division_into_sequences():
    lens = [1, 16, 17, 1, 0, 40, 15]
    needed = sum(-(-rows // 16) for rows in lens)
    assert needed <= num_query_blocks(64, 4, sum(lens), len(lens)) == 12


@pytest.mark.parametrize(
    ("programs", "num_splits", "split_bytes", "lanes"),
    [
        (264, 8, 1, 1),
        (263, 8, 1, 2),
        (64, 8, 1, 5),
        (8, 8, 1, 8),
        (8, 256, 1, 33),
        (8, 256, 2**20, 33),
        (8, 257, 2**20, 1),
        (0, 1, 1, 1),
    ],
)
def test_splits_are_shared_out_until_the_device_is_full(programs, num_splits, split_bytes, lanes):
    assert choose_lanes(CONFIG, programs, num_splits, split_bytes, 132) == lanes
