"""How products are launched on a GPU: pure choices, of which rows make none that changes a bit."""

from itertools import pairwise

import pytest

from octavo_kernels._launch import COMPILED_ARCHITECTURES
from octavo_kernels._linear_launch import (
    LinearConfig,
    RowTile,
    adds_in_registers,
    choose_linear,
    choose_piece,
    choose_tile,
)

pytestmark = pytest.mark.kernels

FEW, MANY = RowTile(rows=64, num_warps=4, num_stages=4), RowTile(128, num_warps=8, num_stages=4)
CONFIG = LinearConfig(columns=128, depth=64, programs=132, tiles=(FEW, MANY))


@pytest.mark.parametrize("capability", [*COMPILED_ARCHITECTURES, 89, 120])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("of_8_bits", [False, True])
def test_every_configuration_is_one_that_the_kernel_takes(element_bytes, of_8_bits, capability):
    config = choose_linear(element_bytes, capability, of_8_bits=of_8_bits)
    for tile in config.tiles:
        for size in (config.columns, config.depth, tile.rows, tile.num_warps):
            assert size & (size - 1) == 0
            assert size == tile.num_warps or size >= 16
    for fewer, more in pairwise(config.tiles):
        assert fewer.rows < more.rows


@pytest.mark.parametrize(("capability", "rows"), [(90, 64), (100, 128)])
def test_no_tile_is_smaller_than_what_the_matrix_instruction_takes(capability, rows):
    assert min(tile.rows for tile in choose_linear(2, capability).tiles) == rows


def test_what_no_kernel_serves_is_refused():
    with pytest.raises(ValueError, match="capability is 75 but must be at least 80"):
        choose_linear(2, 75)


@pytest.mark.parametrize(
    ("in_features", "out_features", "piece"),
    [
        (4096, 4096, 1024),
        (14336, 4096, 3584),
        (4096, 6144, 2048),
        (4096, 28672, 4096),
        (4096, 128256, 4096),
        (576, 576, 576),
        (1100, 64, 576),
        (1000, 64, 1024),
        (7, 64, 64),
        (65536, 1, 512),
    ],
)
def test_inputs_are_divided_where_outputs_alone_do_not_fill_the_device(
    in_features, out_features, piece
):
    assert choose_piece(CONFIG, in_features, out_features) == piece


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, FEW), (64, FEW), (65, MANY), (128, MANY), (10**6, MANY)]
)
def test_rows_get_the_smallest_tile_that_holds_them_or_the_largest(rows, tile):
    assert choose_tile(CONFIG, rows) == tile


@pytest.mark.parametrize(
    ("rows", "out_features", "in_registers"),
    [
        (1, 4096, False),
        (64, 4096, False),
        (128, 4096, False),
        (256, 4096, False),
        (257, 4096, True),
        (1, 8448, False),
        (1, 8449, True),
    ],
)
def test_pieces_are_added_in_registers_once_that_keeps_the_device_busy(
    rows, out_features, in_registers
):
    assert adds_in_registers(CONFIG, rows, out_features) == in_registers
