"""A picture of an engine's state, as `Client.inspect` returns it, for a terminal of any width.

Knows nothing of connections or of command-line options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from octavo_client.block_map import BlockMap
from octavo_client.printable import printable

#: Rows shown of the running, of the waiting and of the shared at most; the rest is counted.
MAX_ROWS = 24
_GAP = 2
_BLOCK_TABLE = "block table"
_ALWAYS = ("#", "request", "status", "computed")
_LEFT = ("request", "status", "adapter", "tenant", _BLOCK_TABLE)
_NO_BLOCK = -1
_RUNNING = ("running", "restoring")

State = Mapping[str, Any]


class EngineView:
    """Totals, every sequence in the order in which it is served, shared blocks, and the pools.

    Args:
        state: what `Client.inspect` returned.
        max_lines: lines of the terminal, where the whole must be seen at once: sequences get what
            room they need first, shared blocks and pools what is left.
    """

    def __init__(self, state: State, max_lines: int | None = None) -> None:
        self._state = state
        self._max_lines = max_lines
        self._shared = {int(block): n for block, n in state["device"]["num_owners"].items()}
        by_request = Counter(sequence["request_id"] for sequence in state["sequences"])
        self._forked = {request_id for request_id, count in by_request.items() if count > 1}
        self._running = [s for s in state["sequences"] if s["status"] in _RUNNING]
        self._waiting = [s for s in state["sequences"] if s["status"] not in _RUNNING]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        pools = self._pools()
        running, waiting, shared, *maps = self._share_out_rows(pools, width)
        yield from map(self._line, self._totals())
        yield from self._sequences("running", self._running[:running], len(self._running), width)
        yield from self._sequences("waiting", self._waiting[:waiting], len(self._waiting), width)
        yield from self._shared_blocks(shared)
        for (title, states), num_rows in zip(pools, maps, strict=True):
            yield from self._gap()
            yield BlockMap(title, states, num_rows)

    def _pools(self) -> list[tuple[str, str]]:
        """Return the title and the states of each pool that has blocks."""
        title = f"blocks of {self._state['block_size']} tokens"
        pools = [(title, self._state["device"]["states"])]
        host = self._state["host"]["states"]
        return [*pools, ("host blocks", host)] if host else pools

    def _share_out_rows(self, pools: Sequence[tuple[str, str]], width: int) -> list[int]:
        """Return the rows of the running, the waiting, the shared blocks and each pool."""
        lists = [min(len(queue), MAX_ROWS) for queue in (self._running, self._waiting)]
        others = [min(len(self._shared), MAX_ROWS)]
        others += [BlockMap(title, states).num_rows(width) for title, states in pools]
        if self._max_lines is None:
            return lists + others
        num_titles = len(list(self._totals())) + sum(1 + bool(rows) for rows in lists)
        num_titles += bool(self._shared) + 2 * len(pools)
        left = self._max_lines - num_titles
        lists = _share_out(left - sum(map(bool, others)), lists)
        return lists + _share_out(left - sum(lists), others)

    def _totals(self) -> Iterator[str]:
        state = self._state
        allocated, used = state["num_allocated_slots"], state["num_used_slots"]
        query, hit = state["num_query_tokens"], state["num_hit_tokens"]
        swaps, recomputes = state["num_swap_preemptions"], state["num_recompute_preemptions"]
        yield (
            f"slots: {allocated:,} allocated, {used:,} used, "
            f"{_percent(allocated - used, allocated)} waste"
        )
        yield f"prefix cache: {hit:,} of {query:,} prompt tokens found, {_percent(hit, query)} hits"
        yield f"preemptions: {swaps:,} by swap, {recomputes:,} by recomputing"
        if state["sequences"]:
            forked = (
                f"; {printable(min(self._forked))}[1]: its second answer" if self._forked else ""
            )
            yield f"computed: tokens with KV / known tokens{forked}"

    def _sequences(
        self, title: str, shown: Sequence[State], count: int, width: int
    ) -> Iterator[Text | Table]:
        order = ", first to last" if count else ""
        yield from self._gap()
        yield self._line(f"{count:,} {title}{order}{_and_more(len(shown), count)}")
        if shown:
            rows = [self._cells(place, sequence) for place, sequence in enumerate(shown, start=1)]
            yield _table(rows, width)

    def _shared_blocks(self, num_rows: int) -> Iterator[Text]:
        if not self._shared:
            return
        hashes = self._state["device"]["hashes"]
        count = len(self._shared)
        noun = "block" if count == 1 else "blocks"
        more = _and_more(num_rows, count)
        yield from self._gap()
        yield self._line(f"{count:,} shared {noun}, with hash and number of owners{more}")
        for block in sorted(self._shared)[:num_rows]:
            name = hashes.get(str(block), "not full")
            yield self._line(f"{block:>6}  {name:<12}  {self._shared[block]:,}")

    def _gap(self) -> Iterator[Text]:
        if self._max_lines is None:
            yield Text()

    def _line(self, text: str) -> Text:
        """Return text that takes one line where lines are counted, else as many as it needs."""
        return Text(text, no_wrap=self._max_lines is not None, overflow="ellipsis")

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
            "adapter": printable(sequence.get("lora_name") or ""),
            "tenant": printable(sequence["tenant"]),
            "age": _seconds(sequence["age_s"]),
            _BLOCK_TABLE: _ranges(table),
        }

    def _name_of(self, sequence: State) -> str:
        """Return the request's id, with the index of a sequence that is one of several."""
        request_id, index = sequence["request_id"], sequence["index"]
        is_one_of_several = index or request_id in self._forked
        return printable(f"{request_id}[{index}]" if is_one_of_several else request_id)


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Lay out the columns that have content, as many as fit; only block tables are cut short."""
    titles = [title for title in rows[0] if title in _ALWAYS or any(row[title] for row in rows)]
    while _width_of(titles, rows) > width and titles[-1] not in _ALWAYS:
        titles.pop()
    room = width - _width_of(titles, rows) + len(_BLOCK_TABLE)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for title in titles:
        justify: Literal["left", "right"] = "left" if title in _LEFT else "right"
        limit = room if title == _BLOCK_TABLE else None
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", max_width=limit)
    for row in rows:
        table.add_row(*(Text(row[title]) for title in titles))
    return table


def _width_of(titles: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """Return the columns that a table takes at least; its block tables may be cut."""
    cells = {title: [title, *(row[title] for row in rows)] for title in titles}
    cells |= {_BLOCK_TABLE: [_BLOCK_TABLE]} if _BLOCK_TABLE in titles else {}
    return sum(max(map(cell_len, column)) + _GAP for column in cells.values()) - _GAP


def _share_out(num_rows: int, wants: Sequence[int]) -> list[int]:
    """Give each the rows that it wants, or where they are too few an equal share of the rest."""
    given = [0] * len(wants)
    left = max(num_rows, 0)
    for num_served, place in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        given[place] = min(wants[place], left // (len(wants) - num_served))
        left -= given[place]
    return given


def _and_more(num_shown: int, count: int) -> str:
    return f"; {num_shown} shown, --json shows all" if num_shown < count else ""


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
