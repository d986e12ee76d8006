"""How a row-independent product is launched: a table by architecture, and pure functions.

Row by row, y = x @ W^T sums over `in` in pieces of a fixed size, counted from 0, and then adds the
pieces in order. What fixes a row's bits, the pieces and the matrix instruction, follows from the
weight's shape, its type and the architecture alone. The number of rows chooses only among launches
that give the same bits; see the kernel for why they do. Knows no kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_kernels._launch import COMPILED_ARCHITECTURES, Architecture, for_capability

_SHORTEST_PIECE = 512  # inputs; what is shorter ends before its loads are under way


@dataclass(frozen=True, slots=True)
class RowTile:
    """A program computes a block of rows."""

    rows: int
    """A power of two; all tiles of a configuration lead to the same matrix instruction."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How products with weights of one size of elements are launched."""

    columns: int
    """Outputs of a program, a power of two."""
    depth: int
    """Inputs of one product in a program, a power of two."""
    programs: int
    """Programs that keep a device of this architecture busy, about one a multiprocessor."""
    tiles: tuple[RowTile, ...]
    """The fewest rows first."""


# Not measured on a device yet. Few rows are bound by reading the weight, so a program keeps two or
# three blocks of it, 16 KiB each, on their way, and two programs fit a multiprocessor. With many
# rows, 128 of them share each block. Matrix instructions differ: sm_90's takes 64 rows, so that is
# the least; those before it take 16; on sm_100 that for 64 rows is not that for 128, so there is
# one tile. sm_120 has sm_86's instruction and shared memory.
_FEW_16 = RowTile(rows=16, num_warps=4, num_stages=4)
_SOME_64 = RowTile(rows=64, num_warps=8, num_stages=3)
_MANY_128 = RowTile(rows=128, num_warps=8, num_stages=3)
_SMALL_SHARED = (RowTile(rows=16, num_warps=4, num_stages=3), _SOME_64, _MANY_128)
_HALF: Mapping[Architecture, LinearConfig] = {
    80: LinearConfig(128, 64, programs=108, tiles=(_FEW_16, _SOME_64, _MANY_128)),
    86: LinearConfig(128, 64, programs=84, tiles=_SMALL_SHARED),
    90: LinearConfig(
        columns=128,
        depth=64,
        programs=132,
        tiles=(
            RowTile(rows=64, num_warps=4, num_stages=4),
            RowTile(rows=128, num_warps=8, num_stages=4),
        ),
    ),
    100: LinearConfig(128, 64, programs=148, tiles=(_MANY_128,)),
    120: LinearConfig(128, 64, programs=170, tiles=_SMALL_SHARED),
    "gfx942": LinearConfig(
        columns=128,
        depth=64,
        programs=304,
        tiles=(
            RowTile(rows=64, num_warps=4, num_stages=2),
            RowTile(rows=128, num_warps=8, num_stages=2),
        ),
    ),
}
# Full float32 runs on no matrix unit.
_SINGLE_TILE = RowTile(rows=32, num_warps=4, num_stages=3)
_SINGLE: Mapping[Architecture, LinearConfig] = {
    80: LinearConfig(columns=64, depth=32, programs=256, tiles=(_SINGLE_TILE,)),
}
# A weight of 8 bits is converted in registers, all of a block at once: more would spill.
_SINGLE_OF_8_BITS: Mapping[Architecture, LinearConfig] = {
    80: LinearConfig(columns=64, depth=16, programs=256, tiles=(_SINGLE_TILE,)),
}

#: The first of NVIDIA's capabilities for which the language converts float8_e4m3fn.
FP8_CAPABILITY = 89


def choose_linear(
    element_bytes: int, capability: Architecture, *, of_8_bits: bool = False
) -> LinearConfig:
    """Choose how rows of such elements are multiplied by a weight of the same, or of 8 bits."""
    if element_bytes == 4:
        return for_capability(_SINGLE_OF_8_BITS if of_8_bits else _SINGLE, capability)
    return for_capability(_HALF, capability)


def weight_types(capability: Architecture) -> tuple[str, ...]:
    """Return the types of weights of 8 bits that products take there, by the language's names.

    Of AMD's architectures, only what the tests compile for is known to convert float8_e4m3fn.
    """
    if isinstance(capability, str):
        has_fp8 = capability in COMPILED_ARCHITECTURES
    else:
        has_fp8 = capability >= FP8_CAPABILITY
    return ("i8", "fp8e4nv") if has_fp8 else ("i8",)


def choose_piece(config: LinearConfig, in_features: int, out_features: int) -> int:
    """Choose how many inputs are summed apart: all, or fewer where outputs fill no device.

    Returns:
        A multiple of the configuration's `depth`.
    """
    pieces = min(
        config.programs // _cdiv(out_features, config.columns), in_features // _SHORTEST_PIECE
    )
    return _cdiv(_cdiv(in_features, max(1, pieces)), config.depth) * config.depth


def choose_tile(config: LinearConfig, rows: int) -> RowTile:
    """Choose the smallest tile that holds all rows, or the largest; it changes no bit."""
    return next((tile for tile in config.tiles if rows <= tile.rows), config.tiles[-1])


def adds_in_registers(config: LinearConfig, rows: int, out_features: int) -> bool:
    """Say whether programs that each sum all pieces keep the device busy; it changes no bit.

    Else every piece has a program of its own, and the pieces are added through memory.
    """
    tile = choose_tile(config, rows)
    blocks = _cdiv(rows, tile.rows) * _cdiv(out_features, config.columns)
    return 2 * blocks > config.programs


def _cdiv(whole: int, part: int) -> int:
    return -(-whole // part)
