"""Tables of figures in Markdown, and their places in the documentation, between markers.

Knows no figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells hold no bar."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table into a page, between empty lines, in the place of the one that stands there.

    Raises:
        ValueError: the page lacks the markers of this name.
    """
    begin, end = markers(name)
    before, rest = page.read_text().split(begin)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def markers(name: str) -> tuple[str, str]:
    """Return what stands before and after a table."""
    return f"<!-- {name}: written by a script, see below -->\n", f"<!-- end of {name} -->"
