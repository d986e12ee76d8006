"""The figures of a measurement as bar charts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.loads import Workload
from benchmarks.peers.measure import Play
from benchmarks.peers.report import Results, Spread, spread
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

MIB = 1 / 2**20

Figure = Callable[[Play], float]


def write_plots(results: Results, folder: Path) -> None:
    """Write `throughput.png`, `latency.png` and `memory.png`, each where there is something."""
    seen = {play.workload for play in results.plays}
    played = [each for each in results.workloads if each.name in seen]
    at_once = [each for each in played if each.capacity_share is None]
    paced = [each for each in played if each.capacity_share is not None]
    if at_once:
        _workloads(results, at_once, folder / "throughput.png")
    if paced:
        _paced(results, paced, folder / "latency.png")
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    _bars(axes, results, None, lambda play: play.resident_bytes * MIB)
    axes.set(xlabel="resident MiB of all processes")
    figure.savefig(folder / "memory.png", dpi=90)
    plt.close(figure)


def _workloads(results: Results, workloads: list[Workload], path: Path) -> None:
    figure, rows = plt.subplots(
        len(workloads), figsize=(7, 2.2 * len(workloads)), layout="constrained", squeeze=False
    )
    for axes, workload in zip(rows[:, 0], workloads, strict=True):
        _bars(axes, results, workload.name, lambda play: play.tokens_per_s)
        axes.set_title(workload.title, fontsize="small", loc="left")
    rows[-1, 0].set(xlabel="output tokens/s")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _paced(results: Results, workloads: list[Workload], path: Path) -> None:
    figure, rows = plt.subplots(
        len(workloads), 2, figsize=(9, 2.4 * len(workloads)), layout="constrained", squeeze=False
    )
    for (left, right), workload in zip(rows, workloads, strict=True):
        _points(left, results, workload.name, lambda play: play.first_token_p50_s * 1e3)
        _points(right, results, workload.name, lambda play: play.per_token_p50_s * 1e3)
        left.set_title(workload.title, fontsize="small", loc="left")
        left.set(xlabel="first token, p50, ms")
        right.set(xlabel="each further token, p50, ms", yticklabels=[])
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _bars(axes: Axes, results: Results, workload: str | None, figure: Figure) -> None:
    """Draw one bar a side, with the least and the most as a line."""
    seen = _seen(results, workload, figure)
    medians = [each.median for each in seen.values()]
    axes.barh(list(seen), medians, xerr=_errors(seen), height=0.7)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize="small")


def _points(axes: Axes, results: Results, workload: str, figure: Figure) -> None:
    """Draw one point a side on a logarithmic axis, with the least and the most as a line."""
    seen = _seen(results, workload, figure)
    medians = [each.median for each in seen.values()]
    axes.errorbar(medians, list(seen), xerr=_errors(seen), fmt="o")
    axes.set(xscale="log", ylim=(-0.5, len(seen) - 0.5))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize="small")


def _seen(results: Results, workload: str | None, figure: Figure) -> dict[str, Spread]:
    """Return the spreads by title, from the bottom up; without sides of which nothing was seen."""
    spreads = {
        side.title: spread(results, side.name, workload, figure) for side in reversed(results.sides)
    }
    return {title: each for title, each in spreads.items() if each}


def _errors(seen: dict[str, Spread]) -> list[list[float]]:
    return [
        [each.median - each.least for each in seen.values()],
        [each.most - each.median for each in seen.values()],
    ]
