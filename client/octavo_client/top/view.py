"""A picture of what a metrics endpoint says of each model, for a terminal of any size.

Knows nothing of connections, keys or command-line options, nor where figures come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from octavo_client.block_map import LOOKS
from octavo_client.printable import printable
from octavo_client.top.figures import (
    Row,
    count_rows,
    engine_state,
    latency_rows,
    now_rows,
    number,
)
from octavo_client.top.history import Trend

#: From this width on the figures of a model stand in two columns.
WIDE = 120
#: Rows of a map of blocks at most, whatever there is room for.
MAX_MAP_ROWS = 8
_LABEL_WIDTH = 14
_COLUMN_WIDTH = 12
_GAP = 4
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_POOLS = (("KV blocks", "kv_blocks"), ("host blocks", "cpu_kv_blocks"))


class TopView:
    """A line of title, one of trouble if there is any, and a section for each model.

    On a terminal of its own the sections share its lines equally, and each is cut at its end, where
    the less urgent figures stand.

    Args:
        title: what is looked at.
        trends: the models.
        trouble: why there is nothing newer; empty if there is.
        is_live: the terminal is its own.
    """

    def __init__(
        self, title: str, trends: Sequence[Trend], trouble: str = "", *, is_live: bool = False
    ) -> None:
        self._title = title
        self._trends = trends
        self._trouble = trouble
        self._is_live = is_live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _cropped(Text(self._title + "  q ends" * self._is_live, "bold"))
        if self._trouble:
            yield _cropped(Text(self._trouble, "bold red"))
        if not self._trends:
            yield _cropped(Text("no model of Octavo is loaded", "yellow"))
            return
        room = None
        if self._is_live:
            left = options.max_height - 1 - bool(self._trouble)
            room = max(left // len(self._trends) - 1, 1)
        for trend in self._trends:
            yield Text()
            yield from map(_cropped, _section(trend, options, room))


def _section(trend: Trend, options: ConsoleOptions, room: int | None) -> list[Text]:
    """Return the lines of a model, at most `room`; spare ones make its maps of blocks larger."""
    width = options.max_width
    is_wide = width >= WIDE
    column = (width - _GAP) // 2 if is_wide else width
    right = _window(trend, column)
    for map_rows in range(MAX_MAP_ROWS, 0, -1):
        left = _now(trend, column, map_rows if room else 2, options.ascii_only)
        lines = _side_by_side(left, right, column) if is_wide else [*left, *right]
        if room is None or len(lines) < room:
            break
    return _cut([_name(trend), *lines], room)


def _cut(lines: list[Text], room: int | None) -> list[Text]:
    if room is None or len(lines) <= room:
        return lines
    rest = f"{len(lines) - room + 1} more lines in a taller terminal"
    return [*lines[: room - 1], Text(rest, "bright_black")]


def _name(trend: Trend) -> Text:
    model, version = trend.now.key
    state, is_well = engine_state(trend)
    text = Text(f"{printable(model)}, version {printable(version)}: ", "bold")
    return text.append(state, "green" if is_well else "red")


def _now(trend: Trend, width: int, map_rows: int, ascii_only: bool) -> list[Text]:
    """Return what is going on, how it came to that, and who owns the blocks."""
    lines = _rows(now_rows(trend), width)
    cells_width = max(width - _LABEL_WIDTH - 2 - _COLUMN_WIDTH, 1)
    rates = trend.generation_rate.cells(cells_width, fmean)
    lines.append(_curve("generated/s", rates, 1, ascii_only))
    lines.append(_curve("waiting", trend.waiting.cells(cells_width, max), 0, ascii_only))
    for label, name in _POOLS:
        lines += _pool(label, name, trend, width, map_rows, ascii_only)
    return lines


def _window(trend: Trend, width: int) -> list[Text]:
    """Return how long things took and how often they happened in the last seconds."""
    took_s = trend.window.seconds
    digits = 0 if took_s >= 9.5 else 1
    seconds = f"last {number(took_s, digits)} s" if took_s else "nothing yet"
    lines = [_columns(seconds, "p50", "p99", "bold")]
    lines += [_columns(*row) for row in latency_rows(trend)]
    lines.append(Text(f"{seconds} (in all)", "bold"))
    return lines + _rows(count_rows(trend), width)


def _columns(label: str, first: str, second: str, style: str = "") -> Text:
    cells = f"{first:>{_COLUMN_WIDTH}}  {second:>{_COLUMN_WIDTH}}"
    return Text(f"{label:<{_LABEL_WIDTH}}  {cells}", style)


def _rows(rows: Iterable[Row], width: int) -> list[Text]:
    return [line for label, parts in rows for line in _flow(label, parts, width)]


def _flow(label: str, parts: Iterable[str], width: int) -> list[Text]:
    """Return a label and parts two spaces apart, on as many lines as they need."""
    lines = [f"{label:<{_LABEL_WIDTH}}"]
    for part in map(printable, parts):
        is_full = len(lines[-1]) > _LABEL_WIDTH and len(lines[-1]) + 2 + len(part) > width
        lines[-1:] = [lines[-1], " " * _LABEL_WIDTH] if is_full else lines[-1:]
        lines[-1] += f"  {part}"
    return [Text(line) for line in lines]


def _curve(label: str, cells: Sequence[float | None], digits: int, ascii_only: bool) -> Text:
    """Return the last minutes as one line of bars, and what the highest of them stands for."""
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    peak = max((value for value in cells if value is not None), default=None)
    bars = "".join(_bar(value, peak or 1.0, levels) for value in cells)
    text = Text(f"{label:<{_LABEL_WIDTH}}  ").append(bars, "cyan")
    return text.append(f"  up to {number(peak, digits)}")


def _bar(value: float | None, peak: float, levels: str) -> str:
    return " " if value is None else levels[round(value / peak * (len(levels) - 1))]


def _pool(
    label: str, name: str, trend: Trend, width: int, map_rows: int, ascii_only: bool
) -> list[Text]:
    """Return a map of a pool's blocks, those of a state together, and their number in words."""
    gauges = trend.now.gauges
    count = int(gauges.get(f"{name}_total", 0))
    if not count:
        return []
    used, cached = (
        min(int(gauges.get(f"{name}_{state}", 0)), count) for state in ("used", "cached")
    )
    states = {"u": used, "c": cached, ".": max(count - used - cached, 0)}
    row_width = max(width - _LABEL_WIDTH - 2, 1)
    cells = apportion(min(row_width * map_rows, count), states)
    text = Text()
    for state, num_cells in cells.items():
        look = LOOKS[state]
        text.append((look.ascii_sign if ascii_only else look.sign) * num_cells, look.style)
    parts = text.divide(range(row_width, len(text), row_width))
    heads = [label, *[""] * (len(parts) - 1)]
    pairs = zip(heads, parts, strict=True)
    rows = [Text(f"{head:<{_LABEL_WIDTH}}  ") + part for head, part in pairs]
    words = [f"{number(of)} {LOOKS[state].name}" for state, of in states.items()]
    return [*rows, *_flow("", [*words, f"of {number(count)}"], width)]


def apportion(num_cells: int, amounts: dict[str, int]) -> dict[str, int]:
    """Divide cells in proportion to amounts; whatever there is of gets one at least."""
    whole = sum(amounts.values())
    cells = {key: max(num_cells * of // whole, of > 0) for key, of in amounts.items()}
    largest = max(amounts, key=amounts.__getitem__)
    cells[largest] += num_cells - sum(cells.values())
    return cells


def _side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    lines = []
    for first, second in zip_longest(left, right, fillvalue=Text()):
        line = first.copy()
        line.truncate(width, overflow="ellipsis", pad=True)
        lines.append(line.append(" " * _GAP).append_text(second))
    return lines


def _cropped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
