"""A picture of an engine's state, as `Client.inspect` returns it, for a terminal of any width.

Knows nothing of connections or of command-line options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from octavo_client.block_map import BlockMap

#: Rows shown of the running, of the waiting and of the shared; the rest is counted.
MAX_ROWS = 24
_GAP = 2
_BLOCK_TABLE = "block table"
_ALWAYS = ("#", "request", "status", "computed")
_LEFT = ("request", "status", "tenant", _BLOCK_TABLE)
_NO_BLOCK = -1
_RUNNING = ("running", "restoring")

State = Mapping[str, Any]


class EngineView:
    """Blocks, totals, and every sequence in the order in which it is served."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._shared = {int(block): n for block, n in state["device"]["num_owners"].items()}
        by_request = Counter(sequence["request_id"] for sequence in state["sequences"])
        self._forked = {request_id for request_id, count in by_request.items() if count > 1}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state = self._state
        yield BlockMap(f"blocks of {state['block_size']} tokens", state["device"]["states"])
        if state["host"]["states"]:
            yield BlockMap("host blocks", state["host"]["states"])
        yield from self._totals()
        sequences = state["sequences"]
        yield from self._sequences(
            "running", [s for s in sequences if s["status"] in _RUNNING], options.max_width
        )
        yield from self._sequences(
            "waiting", [s for s in sequences if s["status"] not in _RUNNING], options.max_width
        )
        yield from self._shared_blocks()

    def _totals(self) -> Iterator[Text]:
        state = self._state
        allocated, used = state["num_allocated_slots"], state["num_used_slots"]
        query, hit = state["num_query_tokens"], state["num_hit_tokens"]
        swaps, recomputes = state["num_swap_preemptions"], state["num_recompute_preemptions"]
        yield Text(
            f"slots: {allocated:,} allocated, {used:,} used, "
            f"{_percent(allocated - used, allocated)} waste"
        )
        yield Text(
            f"prefix cache: {hit:,} of {query:,} prompt tokens found, {_percent(hit, query)} hits"
        )
        yield Text(f"preemptions: {swaps:,} by swap, {recomputes:,} by recomputing")

    def _sequences(
        self, title: str, sequences: Sequence[State], width: int
    ) -> Iterator[Text | Table]:
        yield Text(f"\n{len(sequences):,} {title}{', first to last' if sequences else ''}")
        if not sequences:
            return
        shown = enumerate(sequences[:MAX_ROWS], start=1)
        yield _table([self._cells(place, sequence) for place, sequence in shown], width)
        if len(sequences) > MAX_ROWS:
            yield Text(f"and {len(sequences) - MAX_ROWS:,} more, which --json shows")

    def _shared_blocks(self) -> Iterator[Text]:
        hashes = self._state["device"]["hashes"]
        if self._shared:
            yield Text(f"\n{len(self._shared):,} shared blocks, with hash and number of owners")
        for block in sorted(self._shared)[:MAX_ROWS]:
            name = hashes.get(str(block), "not full")
            yield Text(f"{block:>6}  {name:<12}  {self._shared[block]:,}")
        if len(self._shared) > MAX_ROWS:
            yield Text(f"and {len(self._shared) - MAX_ROWS:,} more, which --json shows")

    def _cells(self, place: int, sequence: State) -> dict[str, str]:
        """Return what a table says of a sequence, the first to be left out last."""
        table = sequence["block_table"]
        num_shared = sum(block in self._shared for block in table)
        return {
            "#": str(place),
            "request": self._name_of(sequence),
            "status": sequence["status"],
            "computed": f"{sequence['num_computed_tokens']}/{sequence['num_tokens']}",
            "blocks": _or_empty(sum(block != _NO_BLOCK for block in table)),
            "shared": _or_empty(num_shared),
            "host": _or_empty(len(sequence["host_table"])),
            "waits": _seconds(sequence["waiting_s"]),
            "priority": _or_empty(sequence["priority"]),
            "tenant": _printable(sequence["tenant"]),
            "age": _seconds(sequence["age_s"]),
            _BLOCK_TABLE: _ranges(table),
        }

    def _name_of(self, sequence: State) -> str:
        """Return the request's id, with the index of a sequence that is one of several."""
        request_id, index = sequence["request_id"], sequence["index"]
        is_one_of_several = index or request_id in self._forked
        return _printable(f"{request_id}[{index}]" if is_one_of_several else request_id)


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Lay out the columns that have content, as many as fit; the last may be cut short."""
    titles = [title for title in rows[0] if title in _ALWAYS or any(row[title] for row in rows)]
    while _width_of(titles, rows) > width and titles[-1] not in _ALWAYS:
        titles.pop()
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for title in titles:
        justify: Literal["left", "right"] = "left" if title in _LEFT else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(row[title]) for title in titles))
    return table


def _width_of(titles: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """Return the columns that a table takes at least; its block tables may be cut."""
    cells = {title: [title, *(row[title] for row in rows)] for title in titles}
    cells |= {_BLOCK_TABLE: [_BLOCK_TABLE]} if _BLOCK_TABLE in titles else {}
    return sum(max(map(len, column)) + _GAP for column in cells.values()) - _GAP


def _ranges(table: Sequence[int]) -> str:
    """Write a block table in order, blocks that follow each other as `first-last`."""
    runs = []
    for _, group in groupby(enumerate(table), _run_of):
        blocks = [block for _, block in group]
        if blocks[0] == _NO_BLOCK:
            runs.append(f"({len(blocks)} out of window)")
        else:
            runs.append(str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}")
    return " ".join(runs)


def _run_of(item: tuple[int, int]) -> int | None:
    """Return what is equal for blocks that follow each other, given a place and its block."""
    place, block = item
    return None if block == _NO_BLOCK else block - place


def _or_empty(value: int) -> str:
    return str(value) if value else ""


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / whole:.1f} %" if whole else "no"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _printable(text: str) -> str:
    # Clients choose what is shown here; it must not reach the terminal as a control sequence.
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
