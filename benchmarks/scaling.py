"""How speed scales: with concurrent requests, context, memory for KV, and the queue.

    python -m benchmarks.scaling --docs docs
    python -m benchmarks.scaling --curve queue --curve pool

Prints each point as it comes, and a table for each curve. A point is measured again when other
processes took more than 5 % of the CPU. With --docs each curve's table is written into scaling.md
there, its figures and its plot beside the other images.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from benchmarks.context_curve import CONTEXT
from benchmarks.curves import Curve, Point, draw, table_of
from benchmarks.doc_tables import write_table
from benchmarks.peers.report import machine
from benchmarks.queue_curve import QUEUE
from benchmarks.quiet import MOST_FOREIGN_SHARE
from benchmarks.script_options import QUICK_NOTE, OutputFolder, refuse_quick_docs
from benchmarks.served_curves import CONCURRENCY, POOL

PAGE = "scaling.md"
CURVES = {curve.name: curve for curve in (CONCURRENCY, CONTEXT, POOL, QUEUE)}


@click.command()
@click.option("--curve", "names", multiple=True, type=click.Choice(list(CURVES)), help="Only this.")
@click.option(
    "--quick",
    is_flag=True,
    help="Few and rough points, to try it out; such figures compare with no others.",
)
@click.option("--docs", type=OutputFolder(PAGE), help="Write tables and plots here.")
def main(names: tuple[str, ...], quick: bool, docs: Path | None) -> None:
    """Measure curves."""
    refuse_quick_docs(quick, docs)
    if quick:
        click.echo(QUICK_NOTE)
    for name in names or tuple(CURVES):
        curve = CURVES[name]
        points = []
        for point in curve.measure(quick):
            points.append(point)
            click.echo(f"{name}: {'  '.join(curve.cells(point))}{void(point)}")
        click.echo(table_of(curve, points))
        if docs is not None:
            write(curve, points, docs)


def void(point: Point) -> str:
    """Return what is said of a point that was disturbed to the last."""
    share = point["foreign_share"]
    return f"  NO CLAIM: others took {share:.0%} of the CPU" if share > MOST_FOREIGN_SHARE else ""


def write(curve: Curve, points: list[Point], docs: Path) -> None:
    """Write a curve's figures, its plot, and its table into the page."""
    path = figures_path(curve, docs)
    figures = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "points": points,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")
    draw(curve, points, path.with_suffix(".png"))
    write_table(docs / PAGE, curve.name, table_of(curve, points))


def figures_path(curve: Curve, docs: Path) -> Path:
    """Return where a curve's figures lie; its plot has the same name."""
    return docs / "images" / f"scaling-{curve.name}.json"


if __name__ == "__main__":
    main()
