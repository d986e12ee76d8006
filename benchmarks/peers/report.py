"""The figures of a measurement as JSON and as Markdown tables; knows no engine."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from benchmarks.doc_tables import markdown_table
from benchmarks.peers.loads import Workload
from benchmarks.peers.measure import OWN_NAME, Failure, Play, counting

NONE = "-"


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What is told of a side beside its figures."""

    name: str
    title: str
    transport: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Results:
    """All that a report is made of."""

    sides: tuple[SideFacts, ...]
    workloads: tuple[Workload, ...]
    plays: tuple[Play, ...]
    failures: tuple[Failure, ...]
    capacity: float | None
    """Requests per second that Poisson arrivals are a share of."""
    is_quick: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of one figure."""

    median: float
    least: float
    most: float
    is_void: bool
    """No play was quiet; the figure claims nothing."""

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """Return the median with the least and the most in brackets, each times `scale`."""
        median, least, most = (
            f"{value * scale:,.{digits}f}" for value in (self.median, self.least, self.most)
        )
        return f"{'void ' if self.is_void else ''}{median} ({least} to {most})"


def spread(
    results: Results, side: str, workload: str | None, figure: Callable[[Play], float]
) -> Spread | None:
    """Return a figure over the plays that count, or None where there are none."""
    plays = [
        play
        for play in counting(results.plays)
        if play.side == side and workload in (None, play.workload)
    ]
    if not plays:
        return None
    values = [figure(play) for play in plays]
    is_void = not any(play.is_valid for play in plays)
    return Spread(statistics.median(values), min(values), max(values), is_void)


def write_json(results: Results, path: Path) -> None:
    """Write every figure."""
    figures = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "is_quick": results.is_quick,
        "capacity_requests_per_s": results.capacity,
        "sides": [asdict(side) for side in results.sides],
        "failures": [asdict(failure) for failure in results.failures],
        "plays": [asdict(play) for play in results.plays],
    }
    path.write_text(json.dumps(figures, indent=2) + "\n")


def markdown(results: Results) -> str:
    """Return the report."""
    quick = "**A quick try with few requests: no figure below is a claim.**\n\n"
    parts = [
        "# Octavo beside other engines\n\n" + (quick if results.is_quick else ""),
        ", ".join(f"{name}: {value}" for name, value in machine().items()) + ".\n\n",
        "Median of the plays in which others took at most 5 % of the CPU, least and most in "
        "brackets; `void` where no play was so quiet.\n\n",
        _throughput(results),
        _latencies(results),
        _sides(results),
        _failures(results.failures),
    ]
    return "".join(parts)


def machine() -> dict[str, str]:
    """Return what the figures were measured on."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": found[1] if found else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
    }


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table under its title, or nothing where it would have no row."""
    return f"## {title}\n\n{markdown_table(heads, rows)}\n" if rows else ""


def _throughput(results: Results) -> str:
    rows = []
    for workload in results.workloads:
        if workload.capacity_share is None:
            spreads = {
                side.name: spread(results, side.name, workload.name, lambda play: play.tokens_per_s)
                for side in results.sides
            }
            cells = [each.text() if each else NONE for each in spreads.values()]
            rows.append([workload.title, *cells, _ratio(spreads)])
    titles = [side.title for side in results.sides]
    heads = ["workload", *titles, "Octavo ÷ best peer"]
    return _section("Output tokens per second", heads, rows)


def _ratio(spreads: Mapping[str, Spread | None]) -> str:
    own = spreads.get(OWN_NAME)
    peers = [each for name, each in spreads.items() if each and name != OWN_NAME]
    if not own or not peers:
        return NONE
    best = max(peers, key=lambda each: each.median)
    void = "void " if own.is_void or best.is_void else ""
    return f"{void}{own.median / best.median:.2f}"


def _latencies(results: Results) -> str:
    text = ""
    for workload in results.workloads:
        if workload.capacity_share is None or results.capacity is None:
            continue
        rate = workload.capacity_share * results.capacity
        rows = []
        for side in results.sides:
            spreads = (
                spread(results, side.name, workload.name, figure)
                for figure in (
                    lambda play: play.first_token_p50_s,
                    lambda play: play.first_token_p99_s,
                    lambda play: play.per_token_p50_s,
                    lambda play: play.between_tokens_p99_s,
                )
            )
            rows.append([side.title, *(e.text(1e3, 1) if e else NONE for e in spreads)])
        title = f"{workload.title}: {rate:.2f} requests/s to every side, ms"
        heads = ["side", "first token, p50", "p99", "each further token, p50", "p99"]
        text += _section(title, heads, rows)
    return text


def _sides(results: Results) -> str:
    rows = []
    for side in results.sides:
        weight = spread(results, side.name, None, lambda play: float(play.resident_bytes))
        rows.append(
            [
                side.title,
                side.transport,
                f"{weight.most / 2**20:,.0f}" if weight else NONE,
                ", ".join(f"{name} {version}" for name, version in side.versions.items()),
                " ".join(f"`{name}={value}`" for name, value in side.settings.items()),
            ]
        )
    heads = ["side", "asked through", "resident MiB, most", "versions", "settings"]
    return _section("Sides", heads, rows)


def _failures(failures: Sequence[Failure]) -> str:
    rows = [
        [each.side, each.stage, each.reason.replace("|", "/").replace("\n", " ")]
        for each in failures
    ]
    return _section("Not played", ["side", "failed at", "reason"], rows)
