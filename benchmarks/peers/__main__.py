"""Octavo and other engines on this machine's CPU: the same seeded requests to each, in turns.

    python -m benchmarks.peers --out build/peers/report

Installs each peer once under `build/peers`, starts all sides, plays every workload in rounds over
the sides (A B C A B C …), and writes `report.md`, `results.json` and plots. See README.md here.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click
from benchmarks.peers.environment import FOLDER
from benchmarks.peers.llama_side import LlamaSide
from benchmarks.peers.loads import WORKLOADS
from benchmarks.peers.measure import CAPACITY_WORKLOAD, Failure, Measurement, Plan
from benchmarks.peers.octavo_side import OctavoSide
from benchmarks.peers.openvino_side import OpenVinoSide
from benchmarks.peers.plots import write_plots
from benchmarks.peers.report import Results, SideFacts, markdown, write_json
from benchmarks.peers.side import Resources, Side, Unavailable
from benchmarks.peers.transformers_side import ContinuousSide, StaticSide
from benchmarks.peers.vllm_side import VllmSide, VllmZenSide
from benchmarks.script_options import COUNT, QUICK_HELP, Amount, OutputFolder

KV_BYTES = 512 * 2**20
SIDES = (
    OctavoSide,
    VllmSide,
    VllmZenSide,
    OpenVinoSide,
    LlamaSide,
    ContinuousSide,
    StaticSide,
)
SIDE_NAMES = [side.name for side in SIDES]
WORKLOAD_NAMES = [workload.name for workload in WORKLOADS]


class Names(click.ParamType[list[str]]):
    """A list of names, separated by commas."""

    name = "names"

    def __init__(self, allowed: list[str]) -> None:
        self._allowed = allowed

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Split and check."""
        names = value.split(",")
        for name in names:
            if name not in self._allowed:
                self.fail(f"{name!r} is none of {', '.join(self._allowed)}", param, ctx)
        return names


@click.command()
@click.option("--peers", type=Names(SIDE_NAMES), default=",".join(SIDE_NAMES), show_default=True)
@click.option(
    "--workloads", type=Names(WORKLOAD_NAMES), default=",".join(WORKLOAD_NAMES), show_default=True
)
@click.option(
    "--rounds", default=3, show_default=True, type=COUNT, help="Plays of each workload and side."
)
@click.option("--quick", is_flag=True, help=QUICK_HELP)
@click.option("--capacity", type=Amount(), help="Requests/s that Poisson arrivals are a share of.")
@click.option("--out", type=OutputFolder(), default=FOLDER / "report", help="Folder to write to.")
def main(
    peers: list[str],
    workloads: list[str],
    rounds: int,
    quick: bool,
    capacity: float | None,
    out: Path,
) -> None:
    """Measure Octavo and its peers."""
    # As after Ctrl-C, every side is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = tuple(workload for workload in WORKLOADS if workload.name in workloads)
    has_arrivals = any(workload.capacity_share is not None for workload in chosen)
    if has_arrivals and capacity is None and CAPACITY_WORKLOAD not in workloads:
        raise click.UsageError("Poisson arrivals need --capacity or the workload mixed")
    measurement = Measurement(Plan(chosen, rounds, quick, capacity), click.echo)
    resources = Resources(tuple(sorted(os.sched_getaffinity(0))), KV_BYTES)
    sides: list[Side] = [make(resources) for make in SIDES if make.name in peers]
    installed = {side: facts for side in sides if (facts := install(side, measurement.failures))}

    def write() -> None:
        results = Results(
            tuple(installed.values()),
            chosen,
            tuple(measurement.plays),
            tuple(measurement.failures),
            measurement.capacity,
            quick,
        )
        write_json(results, out / "results.json")
        (out / "report.md").write_text(markdown(results))
        write_plots(results, out)

    measurement.run(tuple(installed), write)
    click.echo((out / "report.md").read_text())


def install(side: Side, failures: list[Failure]) -> SideFacts | None:
    """Install a side; note why if that cannot be done."""
    click.echo(f"installing {side.title}")
    try:
        versions = side.install()
    except Unavailable as error:
        failures.append(Failure(side.name, "installation", str(error)))
        click.echo(f"{side.title} is out: {error}")
        return None
    return SideFacts(side.name, side.title, side.transport, versions, side.settings)


if __name__ == "__main__":
    main()
