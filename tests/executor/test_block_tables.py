"""Rows of block tables are kept, filled and given up as documented."""

from __future__ import annotations

import numpy as np

from octavo.executor.block_tables import BlockTableRows


def place(rows: BlockTableRows, *tables: list[int]) -> list[int]:
    return rows.place(tables, np.array([len(table) for table in tables])).tolist()


def test_a_table_keeps_its_row_while_others_come_and_go():
    rows = BlockTableRows(max_tables=3, max_blocks=4)
    a, b, c = [1], [2], [3]
    assert place(rows, a, b) == [5, 4]
    assert place(rows, b) == [4]
    assert place(rows, c, b, a) == [3, 4, 5]
    assert rows.gather(np.array([5, 4, 3]), 1).tolist() == [[1], [2], [3]]


def test_only_what_was_appended_is_read():
    rows = BlockTableRows(max_tables=1, max_blocks=4)
    table = [1, 2]
    (row,) = place(rows, table)
    table[0] = 9  # against the rule that a table changes at its end only
    table.append(3)
    assert place(rows, table) == [row]
    assert rows.gather(np.array([row]), 3).tolist() == [[1, 2, 3]]


def test_a_table_is_read_as_far_as_asked():
    rows = BlockTableRows(max_tables=1, max_blocks=2)
    table = [1, 2, 3, 4]
    (row,) = rows.place([table], np.array([2])).tolist()
    assert rows.gather(np.array([row]), 2).tolist() == [[1, 2]]


def test_an_equal_table_in_another_list_gets_another_row():
    rows = BlockTableRows(max_tables=2, max_blocks=2)
    assert len({*place(rows, [1, 2]), *place(rows, [1, 2])}) == 2


def test_rows_of_tables_out_of_the_step_are_given_up_when_none_is_free():
    rows = BlockTableRows(max_tables=2, max_blocks=2)
    a, b, c, d, e = [1], [2], [3], [4], [5]
    assert place(rows, a, b) == [3, 2]
    assert place(rows, c, d) == [1, 0]
    assert place(rows, d, e) == [0, 1]
    assert rows.pick(np.array([0, 1]), np.array([0, 0])).tolist() == [4, 5]
    assert place(rows, a) == [2]


def test_a_full_step_of_new_tables_always_finds_rows():
    rows = BlockTableRows(max_tables=3, max_blocks=1)
    for step in range(20):
        tables = [[step * 3 + index] for index in range(3)]
        placed = rows.place(tables, np.array([1, 1, 1]))
        assert rows.gather(placed, 1).tolist() == tables
