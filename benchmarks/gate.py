"""Does a change make the engine slower? Two revisions play the same short workload in turns.

    python benchmarks/gate.py main            the working tree against main
    python benchmarks/gate.py v0.1.0 HEAD     one revision against another

Both are loaded side by side and play in pairs (A B, B A, …), so that what else the machine does
falls on both. Where memory lies differs from process to process, which alone can make two builds of
the same code differ by 4 or 5 %; so every few pairs have fresh processes. Prints the median of the
pairs' ratios of CPU seconds and of wall seconds, with the interval that holds the median of such
processes 95 times in 100, and whether the tokens are the same. Each has one thread: then CPU
seconds count work and no waiting, and suffer least from other processes. Not a test: nothing passes
or fails.
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
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from script_options import COUNT

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


class Revision(click.ParamType[str]):
    """What git knows as a commit, or the working tree."""

    name = "revision"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Ask git."""
        if value != WORKING_TREE:
            command = ["git", "rev-parse", "--verify", "--quiet", f"{value}^{{commit}}"]
            if subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0:
                self.fail(f"{value!r} is no revision of this repository", param, ctx)
        return value


@click.command()
@click.argument("before", type=Revision())
@click.argument("after", type=Revision(), default=WORKING_TREE)
@click.option(
    "--processes",
    default=5,
    show_default=True,
    type=COUNT,
    help="Fresh processes of each revision.",
)
@click.option("--pairs", default=2, show_default=True, type=COUNT, help="Plays of each process.")
def main(before: str, after: str, processes: int, pairs: int) -> None:
    """Compare the engine of revision BEFORE with that of AFTER, by default the working tree."""
    with ExitStack() as stack:
        folders = [stack.enter_context(checkout(revision)) for revision in (before, after)]
        turns = [play_afresh(folders, pairs) for _ in range(processes)]
    report(before, after, turns)


def play_afresh(folders: Sequence[Path], pairs: int) -> list[tuple[Turn, Turn]]:
    """Return the turns of one fresh process of each side, after one play that counts nowhere."""
    with ExitStack() as stack:
        sides = [stack.enter_context(loaded(folder)) for folder in folders]
        for side in sides:
            play(side)
        return list(play_pairs(sides, pairs))


@contextmanager
def loaded(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a worker with the packages of a folder, and wait until its model is loaded."""
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


def report(before: str, after: str, turns: Sequence[Sequence[tuple[Turn, Turn]]]) -> None:
    """Print how the second revision compares with the first, from the turns of each process."""
    pairs = list(chain.from_iterable(turns))
    click.echo(err=True)
    click.echo(
        f"{after} against {before}, {len(pairs)} pairs in {len(turns)} processes each; "
        "below 1 is faster"
    )
    for name, read in (("CPU", lambda turn: turn.cpu_s), ("wall", lambda turn: turn.wall_s)):
        ratios = [[read(second) / read(first) for first, second in each] for each in turns]
        low, high = interval(ratios)
        seconds = [statistics.median(map(read, side)) for side in zip(*pairs, strict=True)]
        click.echo(
            f"  {name:4} ratio {np.median(ratios):.3f}  [{low:.3f}, {high:.3f}]   "
            f"{seconds[0]:.2f} s -> {seconds[1]:.2f} s"
        )
    sums = [{turn.tokens for turn in side} for side in zip(*pairs, strict=True)]
    click.echo(
        f"  tokens {'are the same' if sums[0] == sums[1] and len(sums[0]) == 1 else 'DIFFER'}"
    )


def interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of the median of ratios [processes, pairs].

    Processes are drawn and not pairs: those of one process are alike.
    """
    random = np.random.default_rng(0)
    drawn = random.integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(np.asarray(ratios)[drawn], axis=(1, 2)), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
