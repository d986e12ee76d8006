"""A picture of a pool of KV blocks: a cell for a few blocks each, whatever the pool's size.

Knows nothing of sequences or of where the states come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_MAX_ROWS = 16
_MIN_CELLS_A_ROW = 8


@dataclass(frozen=True, slots=True)
class _Look:
    """How the blocks of one state are drawn."""

    name: str
    sign: str
    ascii_sign: str
    style: str


#: By the server's letter for the state, the most in use first.
_LOOKS = {
    "s": _Look("shared", "█", "#", "magenta"),
    "u": _Look("used", "▓", "=", "green"),
    "c": _Look("cached", "░", "-", "cyan"),
    ".": _Look("free", "·", ".", "bright_black"),
}


class BlockMap:
    """Rows of cells in order of block ids, each row behind the id of its first block.

    A cell that stands for several blocks shows the state most in use among them, so that no block
    in use is overlooked; the counts in the legend are exact.

    Args:
        title: what the blocks are.
        states: one letter a block: `s` shared, `u` used, `c` cached, `.` free.
    """

    def __init__(self, title: str, states: str) -> None:
        self._title = title
        self._states = states

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label_width = len(str(len(self._states) - 1))
        cells_a_row = _cells_a_row(options.max_width - label_width - 1)
        blocks_a_cell = _blocks_a_cell(len(self._states), cells_a_row)
        blocks_a_row = cells_a_row * blocks_a_cell
        yield Text(f"{len(self._states):,} {self._title}, {blocks_a_cell:,} a cell")
        yield self._legend(options.ascii_only)
        for first in range(0, len(self._states), blocks_a_row):
            row = Text(f"{first:>{label_width}} ", no_wrap=True, overflow="crop")
            end = min(first + blocks_a_row, len(self._states))
            for start in range(first, end, blocks_a_cell):
                look = _most_in_use(self._states[start : min(start + blocks_a_cell, end)])
                row.append(look.ascii_sign if options.ascii_only else look.sign, look.style)
            yield row

    def _legend(self, ascii_only: bool) -> Text:
        text = Text()
        for letter, look in _LOOKS.items():
            text.append(look.ascii_sign if ascii_only else look.sign, look.style)
            text.append(f" {self._states.count(letter):,} {look.name}  ")
        return text


def _cells_a_row(width: int) -> int:
    """Return the largest power of two of cells that fits, so that labels are round numbers."""
    return 1 << max(width, _MIN_CELLS_A_ROW).bit_length() - 1


def _blocks_a_cell(num_blocks: int, cells_a_row: int) -> int:
    cells = cells_a_row * _MAX_ROWS
    return 1 << (-(-num_blocks // cells) - 1).bit_length()


def _most_in_use(states: str) -> _Look:
    return next(look for letter, look in _LOOKS.items() if letter in states)
