"""How each kernel is launched: tables by architecture, and pure functions that read them.

A choice depends on the architecture and on sizes that a model fixes, never on how many rows a step
has: a row's bits are the same in any batch, and no new kernel is compiled while requests wait.
Knows neither torch nor the Triton language.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

_Table = TypeVar("_Table")

Architecture = int | str
"""What code is compiled for: of an NVIDIA GPU its capability, major * 10 + minor, so 90 for sm_90;
of an AMD GPU its name, such as "gfx942"."""

COMPILED_CAPABILITIES = (80, 86, 90, 100)
"""NVIDIA's architectures that every entry of the tables is compiled for in the tests."""
COMPILED_ARCHITECTURES: tuple[Architecture, ...] = (*COMPILED_CAPABILITIES, "gfx942")
"""All that every entry of the tables is compiled for."""


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """A program holds a block of rows, each whole."""

    block_rows: int
    block_size: int
    """Longest row."""
    num_warps: int


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """A program turns a block of heads of one token."""

    block_heads: int
    block_half: int
    """Most angles of a position."""
    num_warps: int


@dataclass(frozen=True, slots=True)
class PiecesConfig:
    """A program computes one piece of one row."""

    block_size: int
    num_warps: int


# By the oldest architecture an entry serves. Not measured on a device yet: a thread holds 8 to 32
# elements, so that it loads 16 bytes at once, and none of them spills.
_RMS_NORM: Mapping[Architecture, tuple[RowsConfig, ...]] = {
    80: (
        RowsConfig(block_rows=8, block_size=128, num_warps=4),
        RowsConfig(block_rows=4, block_size=256, num_warps=4),
        RowsConfig(block_rows=1, block_size=1024, num_warps=4),
        RowsConfig(block_rows=1, block_size=2048, num_warps=8),
        RowsConfig(block_rows=1, block_size=4096, num_warps=8),
        RowsConfig(block_rows=1, block_size=8192, num_warps=16),
        RowsConfig(block_rows=1, block_size=16384, num_warps=16),
    ),
}
_APPLY_ROPE: Mapping[Architecture, tuple[HeadsConfig, ...]] = {
    80: (
        HeadsConfig(block_heads=16, block_half=32, num_warps=2),
        HeadsConfig(block_heads=8, block_half=64, num_warps=2),
        HeadsConfig(block_heads=4, block_half=128, num_warps=2),
    ),
}
_GATED: Mapping[Architecture, PiecesConfig] = {80: PiecesConfig(block_size=1024, num_warps=4)}
_BLOCK_MOVES: Mapping[Architecture, PiecesConfig] = {80: PiecesConfig(block_size=4096, num_warps=8)}


def for_capability(tables: Mapping[Architecture, _Table], capability: Architecture) -> _Table:
    """Return the table of the newest architecture that is not newer than this one.

    AMD's architectures have no order: one is served by its own table, or by the oldest of all.

    Raises:
        ValueError: Every table is of a newer one.
    """
    oldest = min(key for key in tables if isinstance(key, int))
    if isinstance(capability, str):
        return tables.get(capability, tables[oldest])
    if capability < oldest:
        raise ValueError(f"capability is {capability} but must be at least {oldest}")
    return tables[max(key for key in tables if isinstance(key, int) and key <= capability)]


def rms_norm_configs(capability: Architecture) -> tuple[RowsConfig, ...]:
    """Return every configuration that `choose_rms_norm` gives, the shortest rows first."""
    return for_capability(_RMS_NORM, capability)


def choose_rms_norm(hidden: int, capability: Architecture) -> RowsConfig:
    """Choose how rows of `hidden` elements are normalised, alone or after an addition.

    Raises:
        ValueError: Rows are longer than any configuration holds.
    """
    configs = rms_norm_configs(capability)
    for config in configs:
        if hidden <= config.block_size:
            return config
    raise ValueError(f"rows have {hidden} elements but may have {configs[-1].block_size} on a GPU")


def apply_rope_configs(capability: Architecture) -> tuple[HeadsConfig, ...]:
    """Return every configuration that `choose_apply_rope` gives, the fewest angles first."""
    return for_capability(_APPLY_ROPE, capability)


def choose_apply_rope(num_angles: int, capability: Architecture) -> HeadsConfig:
    """Choose how heads are turned by `num_angles` angles.

    Raises:
        ValueError: There are more angles than any configuration holds.
    """
    configs = apply_rope_configs(capability)
    for config in configs:
        if num_angles <= config.block_half:
            return config
    most = configs[-1].block_half
    raise ValueError(f"a position has {num_angles} angles but may have {most} on a GPU")


def choose_gated(capability: Architecture) -> PiecesConfig:
    """Choose how the gated activations are computed."""
    return for_capability(_GATED, capability)


def choose_block_moves(capability: Architecture) -> PiecesConfig:
    """Choose how blocks are gathered and scattered."""
    return for_capability(_BLOCK_MOVES, capability)
