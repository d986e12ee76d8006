"""The figures of a measurement as bar charts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.loads import Workload
from benchmarks.peers.measure import Play
from benchmarks.peers.report import Results, SideFacts, Spread, spread
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MIB = 1 / 2**20


def write_plots(results: Results, folder: Path) -> None:
    """Write `throughput.png`, `latency.png` and `memory.png`, each where there is something."""
    at_once = [each for each in results.workloads if each.capacity_share is None]
    paced = [each for each in results.workloads if each.capacity_share is not None]
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
        _bars(left, results, workload.name, lambda play: play.first_token_p50_s * 1e3)
        _bars(right, results, workload.name, lambda play: play.per_token_p50_s * 1e3)
        left.set_title(workload.title, fontsize="small", loc="left")
        left.set(xlabel="first token, p50, ms", xscale="log")
        right.set(xlabel="each further token, p50, ms", xscale="log", yticklabels=[])
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _bars(
    axes: Axes, results: Results, workload: str | None, figure: Callable[[Play], float]
) -> None:
    """Draw one bar a side, with the least and the most as a line; empty where nothing was seen."""
    drawn: list[tuple[SideFacts, Spread]] = [
        (side, seen)
        for side in reversed(results.sides)
        if (seen := spread(results, side.name, workload, figure))
    ]
    medians = [seen.median for _, seen in drawn]
    errors = [
        [seen.median - seen.least for _, seen in drawn],
        [seen.most - seen.median for _, seen in drawn],
    ]
    axes.barh([side.title for side, _ in drawn], medians, xerr=errors, height=0.7)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize="small")
