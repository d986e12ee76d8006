"""Tables of figures that scripts write into the documentation, between markers that name them.

Knows no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with an empty line before and after it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table into a page, in the place of the one that stands there.

    Raises:
        ValueError: the page lacks the markers of this name.
    """
    begin, end = markers(name)
    before, rest = page.read_text().split(begin)
    after = rest.split(end, 1)[1]
    page.write_text(before + begin + table + end + after)


def markers(name: str) -> tuple[str, str]:
    """Return what stands before and after a table."""
    return f"<!-- {name}: written by a script, see below -->\n", f"<!-- end of {name} -->"
