"""Does a change make the engine slower? Two revisions play the same short workload in turns.

    python benchmarks/gate.py main            the working tree against main
    python benchmarks/gate.py v0.1.0 HEAD     one revision against another

Both are loaded side by side and play in pairs (A B, B A, …), so that what else the machine does
falls on both. Prints the median of the pairs' ratios of CPU seconds and of wall seconds, with the
interval that holds the median of such pairs 95 times in 100, and whether the tokens are the same.
Each has one thread: then CPU seconds count work and no waiting, and suffer least from other
processes. Not a test: nothing passes or fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

ROOT = Path(__file__).parents[1]
WORKING_TREE = "the working tree"
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Turn:
    """One play of one revision."""

    wall_s: float
    cpu_s: float
    tokens: int
    """Checksum of every answer's token ids."""


@click.command()
@click.argument("before")
@click.argument("after", default=WORKING_TREE)
@click.option("--pairs", default=10, show_default=True, help="Plays of each revision.")
def main(before: str, after: str, pairs: int) -> None:
    """Compare the engine of revision BEFORE with that of AFTER, by default the working tree."""
    with ExitStack() as stack:
        sides = [stack.enter_context(loaded(revision)) for revision in (before, after)]
        for side in sides:
            play(side)
        turns = list(play_pairs(sides, pairs))
    report(before, after, turns)


@contextmanager
def loaded(revision: str) -> Iterator[subprocess.Popen[str]]:
    """Start a worker with the packages of a revision, and wait until its model is loaded."""
    with checkout(revision) as folder:
        packages = [str(folder / name) for name in ("backend", "kernels", "client")]
        worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gate_worker.py"))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with worker:
            answer(worker)
            yield worker


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Return a folder with the files of a revision, for as long as the block runs."""
    if revision == WORKING_TREE:
        yield ROOT
        return
    with TemporaryDirectory(prefix="octavo-gate-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def play_pairs(sides: Sequence[subprocess.Popen[str]], pairs: int) -> Iterator[tuple[Turn, Turn]]:
    """Yield the turns of each pair, before and after; who begins changes from pair to pair."""
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        turns = {index: play(sides[index]) for index in order}
        yield turns[0], turns[1]
        click.echo(".", nl=False, err=True)
    click.echo(err=True)


def play(side: subprocess.Popen[str]) -> Turn:
    """Let one side play the workload once."""
    assert side.stdin is not None
    side.stdin.write("go\n")
    side.stdin.flush()
    return Turn(**answer(side))


def answer(side: subprocess.Popen[str]) -> dict[str, float]:
    """Read the next line of a worker."""
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise click.ClickException(f"a worker ended with status {side.wait()}; see above")
    figures: dict[str, float] = json.loads(line)
    return figures


def report(before: str, after: str, turns: Sequence[tuple[Turn, Turn]]) -> None:
    """Print how the second revision compares with the first."""
    click.echo(f"{after} against {before}, {len(turns)} pairs; below 1 is faster")
    for name, read in (("CPU", lambda turn: turn.cpu_s), ("wall", lambda turn: turn.wall_s)):
        ratios = [read(second) / read(first) for first, second in turns]
        low, high = interval(ratios)
        seconds = [statistics.median(map(read, side)) for side in zip(*turns, strict=True)]
        click.echo(
            f"  {name:4} ratio {statistics.median(ratios):.3f}  [{low:.3f}, {high:.3f}]   "
            f"{seconds[0]:.2f} s -> {seconds[1]:.2f} s"
        )
    sums = [{turn.tokens for turn in side} for side in zip(*turns, strict=True)]
    click.echo(
        f"  tokens {'are the same' if sums[0] == sums[1] and len(sums[0]) == 1 else 'DIFFER'}"
    )


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of the median."""
    random = np.random.default_rng(0)
    drawn = random.choice(np.asarray(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
