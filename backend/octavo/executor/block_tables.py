"""Block tables as rows of one array, kept between steps and only appended to.

Knows lists of block ids; nothing of sequences, tokens or the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

#: Rows for each table of a step: some for tables that miss a step and come back unchanged, and so
#: that rows of tables that are gone are looked for only now and then.
_ROWS_PER_TABLE = 2


class BlockTableRows:
    """Give each block table a row of its own for as long as there is room.

    A row belongs to a list object: whoever changes a table elsewhere than at its end makes a new
    list of it, and so gets a new row.

    Args:
        max_tables: most tables of one step.
        max_blocks: most blocks of one table.
    """

    def __init__(self, max_tables: int, max_blocks: int) -> None:
        num_rows = _ROWS_PER_TABLE * max_tables
        self._blocks = np.zeros((num_rows, max_blocks), np.int32)
        self._num_filled = np.zeros(num_rows, np.int64)
        # The lists are held, so that no other list takes over the id of one that has a row.
        self._tables: dict[int, list[int]] = {}
        self._row_by_id: dict[int, int] = {}
        self._free_rows = list(range(num_rows))

    def place(
        self, tables: Rows[list[int]], num_blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the row of each table, [num_tables] int64, filled with its first `num_blocks`.

        Args:
            tables: those of one step, all of them different lists.
            num_blocks: [num_tables], at most the length of each table.
        """
        try:
            found = self._find(tables)
        except KeyError:
            self._add(tables)
            found = self._find(tables)
        rows = np.array(found, np.int64)
        for index in np.flatnonzero(self._num_filled[rows] < num_blocks):
            row, end = found[index], num_blocks[index]
            begin = self._num_filled[row]
            self._blocks[row, begin:end] = tables[index][begin:end]
            self._num_filled[row] = end
        return rows

    def gather(self, rows: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int32]:
        """Return the first `width` blocks of some rows, a new array [num_rows, width]."""
        return self._blocks[rows, :width]

    def pick(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Return one block for each pair of row and column."""
        return self._blocks[rows, columns]

    def _find(self, tables: Rows[list[int]]) -> list[int]:
        return list(map(self._row_by_id.__getitem__, map(id, tables)))

    def _add(self, tables: Rows[list[int]]) -> None:
        new = [table for table in tables if id(table) not in self._row_by_id]
        if len(new) > len(self._free_rows):
            self._forget_all_but(tables)
        for table in new:
            row = self._free_rows.pop()
            self._row_by_id[id(table)] = row
            self._tables[row] = table
            self._num_filled[row] = 0

    def _forget_all_but(self, tables: Rows[list[int]]) -> None:
        kept = set(map(id, tables))
        for table_id, row in list(self._row_by_id.items()):
            if table_id not in kept:
                del self._row_by_id[table_id], self._tables[row]
                self._free_rows.append(row)
