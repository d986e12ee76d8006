"""How kernels are launched follows from tables alone."""

from itertools import pairwise

import pytest

from octavo_kernels._launch import (
    COMPILED_ARCHITECTURES,
    apply_rope_configs,
    choose_apply_rope,
    choose_block_moves,
    choose_gated,
    choose_rms_norm,
    for_capability,
    rms_norm_configs,
)

pytestmark = pytest.mark.kernels

every_capability = pytest.mark.parametrize("capability", COMPILED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("capability", "table"), [(80, "a"), (86, "a"), (89, "a"), (90, "b"), (100, "c"), (120, "c")]
)
def test_an_architecture_is_served_by_the_newest_table_that_is_not_newer(capability, table):
    assert for_capability({80: "a", 90: "b", 100: "c"}, capability) == table


@pytest.mark.parametrize(("name", "table"), [("gfx942", "m"), ("gfx950", "a")])
def test_an_amd_architecture_is_served_by_its_own_table_or_the_oldest(name, table):
    assert for_capability({90: "b", 80: "a", "gfx942": "m"}, name) == table


def test_an_architecture_older_than_every_table_is_refused():
    with pytest.raises(ValueError, match=r"^capability is 75 but must be at least 80$"):
        for_capability({90: "b", 80: "a"}, 75)


@every_capability
def test_rows_get_the_shortest_configuration_that_holds_them(capability):
    configs = rms_norm_configs(capability)
    for shorter, longer in pairwise(configs):
        assert choose_rms_norm(shorter.block_size, capability) == shorter
        assert choose_rms_norm(shorter.block_size + 1, capability) == longer
    assert choose_rms_norm(1, capability) == configs[0]


@every_capability
def test_heads_get_the_smallest_configuration_that_holds_their_angles(capability):
    configs = apply_rope_configs(capability)
    for smaller, larger in pairwise(configs):
        assert choose_apply_rope(smaller.block_half, capability) == smaller
        assert choose_apply_rope(smaller.block_half + 1, capability) == larger


@every_capability
def test_every_size_is_a_power_of_two_as_the_language_wants(capability):
    sizes = []
    for pieces in (choose_gated(capability), choose_block_moves(capability)):
        sizes += [pieces.block_size, pieces.num_warps]
    for rows in rms_norm_configs(capability):
        sizes += [rows.block_rows, rows.block_size, rows.num_warps]
    for heads in apply_rope_configs(capability):
        sizes += [heads.block_heads, heads.block_half, heads.num_warps]
    assert [size for size in sizes if size < 1 or size & (size - 1)] == []


def test_sizes_past_every_configuration_are_refused():
    with pytest.raises(ValueError, match=r"^rows have 16385 elements but may have 16384 on a GPU$"):
        choose_rms_norm(16385, 90)
    with pytest.raises(ValueError, match=r"^a position has 129 angles but may have 128 on a GPU$"):
        choose_apply_rope(129, 90)
