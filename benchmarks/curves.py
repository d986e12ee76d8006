"""What a curve is: points that are measured, told as a table and drawn. Knows no measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.doc_tables import markdown_table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Point = dict[str, float]
"""Figures by name; `foreign_share` is what other processes took of the CPU meanwhile."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure over all points."""

    key: str
    label: str
    scale: float = 1.0
    """From the figure to the unit that its panel names."""
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis."""

    label: str
    """With the unit."""
    lines: tuple[Line, ...]
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """One thing that grows, and what is measured meanwhile."""

    name: str
    x_key: str
    x_label: str
    panels: tuple[Panel, ...]
    measure: Callable[[bool], Iterable[Point]]
    """Gives the points in order; when told to be quick, few and rough ones."""

    @property
    def columns(self) -> list[tuple[str, Line]]:
        """Return all lines, each with its panel's and its own label."""
        return [
            (", ".join(filter(None, (panel.label, line.label))), line)
            for panel in self.panels
            for line in panel.lines
        ]

    def cells(self, point: Point) -> list[str]:
        """Return a point's figures as text: where it is, then the columns."""
        figures = [f"{point[line.key] * line.scale:,.{line.digits}f}" for _, line in self.columns]
        return [f"{point[self.x_key]:,.0f}", *figures]


def table_of(curve: Curve, points: Sequence[Point]) -> str:
    """Return the points as a Markdown table, a row each."""
    titles = [title for title, _ in curve.columns]
    return markdown_table([curve.x_label, *titles], [curve.cells(point) for point in points])


def draw(curve: Curve, points: Sequence[Point], path: Path) -> None:
    """Plot all panels side by side."""
    width = 4.2 * len(curve.panels)
    figure, panels = plt.subplots(
        1, len(curve.panels), figsize=(width, 3.2), layout="constrained", squeeze=False
    )
    for axes, panel in zip(panels[0], curve.panels, strict=True):
        _draw_panel(axes, curve, panel, points)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_panel(axes: Axes, curve: Curve, panel: Panel, points: Sequence[Point]) -> None:
    values = [point[curve.x_key] for point in points]
    for line in panel.lines:
        heights = [point[line.key] * line.scale for point in points]
        axes.plot(values, heights, "o-", label=line.label)
    axes.set(xlabel=curve.x_label, ylabel=panel.label)
    # Linear around zero, where a queue may be empty.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(values, [f"{value:,.0f}" for value in values], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if panel.is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)
    if len(panel.lines) > 1:
        axes.legend(fontsize="small")
