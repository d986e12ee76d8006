"""A picture of a pool of KV blocks: a cell for a few blocks each, whatever the pool's size.

Knows nothing of sequences or of where the states come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

#: Rows of cells at most, whatever there is room for.
MAX_ROWS = 16
_MIN_CELLS_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Look:
    """How the blocks of one state are drawn."""

    name: str
    sign: str
    ascii_sign: str
    style: str


#: By the server's letter for the state, the most in use first.
LOOKS = {
    "s": Look("shared", "█", "#", "magenta"),
    "u": Look("used", "▓", "=", "green"),
    "c": Look("cached", "░", "-", "cyan"),
    ".": Look("free", "·", ".", "bright_black"),
}


class BlockMap:
    """Rows of cells in order of block ids, each row behind the id of its first block.

    A cell that stands for several blocks shows the state most in use among them, so that no block
    in use is overlooked; the counts in the legend are exact. Rows of free blocks that follow each
    other are one line, and a cell stands for as few blocks as the rows then allow.

    Args:
        title: what the blocks are.
        states: one letter a block: `s` shared, `u` used, `c` cached, `.` free.
        max_rows: rows at most, below the two lines of title and legend.
    """

    def __init__(self, title: str, states: str, max_rows: int = MAX_ROWS) -> None:
        self._title = title
        self._states = states
        self._max_rows = max_rows

    def num_rows(self, width: int) -> int:
        """Return how many rows it takes in a terminal of this width."""
        _, rows = self._layout(self._cells_a_row(width))
        return len(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks_a_cell, rows = self._layout(self._cells_a_row(options.max_width))
        title = f"{len(self._states):,} {self._title}, {blocks_a_cell:,} a cell"
        yield Text(title, no_wrap=True, overflow="crop")
        yield self._legend(options.ascii_only)
        for row in rows:
            line = Text(f"{row.start:>{self._label_width}} ", no_wrap=True, overflow="crop")
            if len(row) > self._cells_a_row(options.max_width) * blocks_a_cell:
                line.append(f"{len(row):,} free blocks", LOOKS["."].style)
            else:
                for start in row[::blocks_a_cell]:
                    look = _most_in_use(self._states[start : min(start + blocks_a_cell, row.stop)])
                    line.append(look.ascii_sign if options.ascii_only else look.sign, look.style)
            yield line

    def _legend(self, ascii_only: bool) -> Text:
        text = Text(no_wrap=True, overflow="crop")
        for letter, look in LOOKS.items():
            text.append(look.ascii_sign if ascii_only else look.sign, look.style)
            text.append(f" {self._states.count(letter):,} {look.name}  ")
        return text

    @property
    def _label_width(self) -> int:
        return len(str(len(self._states) - 1))

    def _cells_a_row(self, width: int) -> int:
        """Return the largest power of two of cells that fits, so that labels are round numbers."""
        return 1 << max(width - self._label_width - 1, _MIN_CELLS_A_ROW).bit_length() - 1

    def _layout(self, cells_a_row: int) -> tuple[int, Sequence[range]]:
        """Return the blocks of a cell, and those of each row."""
        blocks_a_cell = 1
        rows = self._rows(cells_a_row)
        while len(rows) > max(self._max_rows, 1):
            blocks_a_cell *= 2
            rows = self._rows(cells_a_row * blocks_a_cell)
        return blocks_a_cell, rows

    def _rows(self, blocks_a_row: int) -> list[range]:
        """Return the blocks of each row; rows of free blocks only are joined."""
        num_blocks = len(self._states)
        starts = range(0, num_blocks, blocks_a_row)
        rows = []
        for is_free, group in groupby(starts, lambda start: self._is_free(start, blocks_a_row)):
            members = list(group)
            joined = [members] if is_free else [[start] for start in members]
            rows += [range(m[0], min(m[-1] + blocks_a_row, num_blocks)) for m in joined]
        return rows

    def _is_free(self, start: int, count: int) -> bool:
        return not self._states[start : start + count].strip(".")


def _most_in_use(states: str) -> Look:
    return next(look for letter, look in LOOKS.items() if letter in states)
