"""How paged attention is launched: a table by architecture, and pure functions that read it.

Decode and prefill share a configuration: a row's bits depend on the size of tiles and splits, and
on which matrix instruction the rows and warps lead to. Knows no kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_kernels._launch import Architecture, for_capability

_PARTS_BYTES = 2**28  # most memory that unmerged splits may take
_MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """A program attends from a block of rows to one KV head, tile by tile."""

    rows: int
    """Query rows of a program: tokens times the query heads that share a KV head; 16 or more."""
    tile: int
    """Positions of one product over keys, a power of two, 16 or more."""
    split: int
    """Positions reduced apart and then merged, counted from 0; a multiple of `tile`."""
    num_warps: int
    num_stages: int
    programs_per_processor: int = 2
    """Programs that fill one multiprocessor: splits run side by side up to this many."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Configurations by head size."""

    narrow: AttentionConfig
    """Heads of up to 64 elements."""
    middle: AttentionConfig
    """Heads of up to 128 elements."""
    wide: AttentionConfig
    """Heads of up to 256 elements."""


# Not measured on a device yet. 64 rows are what the matrix instruction of sm_90 takes; a decode
# step fills few of them, and should still compute faster than memory delivers keys. Tiles are as
# large as keep the sums of a split and those of the row in registers. As loads depend on the block
# table, three stages let them run ahead by one tile, and five by two: with two programs on a
# multiprocessor of sm_90, 64 KiB of keys and values are on their way to it.
_HALF_80 = _Sizes(
    narrow=AttentionConfig(rows=64, tile=32, split=512, num_warps=4, num_stages=2),
    middle=AttentionConfig(rows=64, tile=32, split=512, num_warps=8, num_stages=3),
    wide=AttentionConfig(rows=32, tile=16, split=512, num_warps=4, num_stages=3),
)
_HALF: Mapping[Architecture, _Sizes] = {
    80: _HALF_80,
    90: _Sizes(
        narrow=AttentionConfig(rows=64, tile=64, split=512, num_warps=4, num_stages=5),
        middle=AttentionConfig(rows=64, tile=32, split=512, num_warps=4, num_stages=5),
        wide=AttentionConfig(rows=64, tile=16, split=512, num_warps=8, num_stages=5),
    ),
    100: _Sizes(
        narrow=AttentionConfig(rows=64, tile=64, split=512, num_warps=4, num_stages=5),
        middle=AttentionConfig(rows=64, tile=32, split=512, num_warps=8, num_stages=5),
        wide=AttentionConfig(rows=32, tile=16, split=512, num_warps=4, num_stages=5),
    ),
    120: _HALF_80,  # its matrix instruction is that of sm_80
}
# Products in full float32 run on no matrix unit, and keep their operands in registers. What fits
# without spilling heads of 256 differs by architecture.
_SINGLE_NARROW = AttentionConfig(rows=16, tile=32, split=512, num_warps=8, num_stages=2)
_SINGLE_MIDDLE = AttentionConfig(rows=16, tile=32, split=512, num_warps=4, num_stages=2)
_SINGLE: Mapping[Architecture, _Sizes] = {
    80: _Sizes(
        narrow=_SINGLE_NARROW,
        middle=_SINGLE_MIDDLE,
        wide=AttentionConfig(rows=16, tile=16, split=512, num_warps=8, num_stages=3),
    ),
    86: _Sizes(
        narrow=_SINGLE_NARROW,
        middle=_SINGLE_MIDDLE,
        wide=AttentionConfig(rows=16, tile=16, split=512, num_warps=8, num_stages=2),
    ),
    90: _Sizes(
        narrow=_SINGLE_NARROW,
        middle=_SINGLE_MIDDLE,
        wide=AttentionConfig(rows=16, tile=32, split=512, num_warps=8, num_stages=2),
    ),
}


def choose_attention(
    head_dim: int, element_bytes: int, capability: Architecture
) -> AttentionConfig:
    """Choose how attention with heads of `head_dim` elements runs.

    Raises:
        ValueError: Heads are longer than any configuration holds.
    """
    for longest, config in attention_configs(element_bytes, capability).items():
        if head_dim <= longest:
            return config
    raise ValueError(f"head_dim is {head_dim} but may be at most 256 on a GPU")


def attention_configs(element_bytes: int, capability: Architecture) -> dict[int, AttentionConfig]:
    """Return every configuration that `choose_attention` gives, by the longest head it serves."""
    sizes = for_capability(_SINGLE if element_bytes == 4 else _HALF, capability)
    return {64: sizes.narrow, 128: sizes.middle, 256: sizes.wide}


def rows_for(config: AttentionConfig, group: int) -> int:
    """Return the rows of a program: those of the configuration, or more to hold one group.

    Raises:
        ValueError: More query heads share a KV head than a program holds.
    """
    if group > _MAX_GROUP:
        raise ValueError(f"{group} query heads share a KV head but {_MAX_GROUP} may on a GPU")
    return max(config.rows, 1 << (group - 1).bit_length())


def num_query_blocks(rows: int, group: int, num_tokens: int, num_seqs: int) -> int:
    """Return an upper bound of the query blocks of a step, known without reading lengths."""
    return num_tokens // (rows // group) + num_seqs


def choose_lanes(
    config: AttentionConfig, programs: int, num_splits: int, split_bytes: int, num_processors: int
) -> int:
    """Choose how many programs share the splits of one row; 1 merges them in registers.

    The choice changes no bit: each split is reduced alone, and they are merged in order of position
    either way.

    Args:
        config: How attention is launched.
        programs: Programs of the grid before splits are shared out.
        num_splits: Splits of the longest sequence.
        split_bytes: Memory of one unmerged split of all rows.
        num_processors: Multiprocessors of the device.
    """
    if num_splits * split_bytes > _PARTS_BYTES:
        return 1
    wanted = -(-num_processors * config.programs_per_processor // max(1, programs))
    return min(num_splits, wanted)
