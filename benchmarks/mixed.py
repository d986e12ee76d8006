"""Octavo through its own Triton server by gRPC against static batches of the same model.

    python -m benchmarks.mixed --docs docs

Both sides play the 64 mixed requests, sent all at once, in turns (A B A B …), with the same number
of threads; every play has new prompts, which no cache has seen. Static batching is Octavo's own
traditional mode (`octavo.static_engine`), which is transformers' `generate` on eight requests at a
time, in the order of arrival, each batch until its longest output ends: then its answers count as
sent. A play is repeated when other processes took more than 5 % of the CPU; a round in which that
did not help is void. How memory is used is counted, by `benchmarks.memory`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from benchmarks.doc_tables import markdown_table, write_table
from benchmarks.memory import contiguous, paged, static_batches
from benchmarks.peers.loads import WORKLOADS, Load
from benchmarks.peers.measure import check
from benchmarks.peers.octavo_side import OctavoSide
from benchmarks.peers.report import Spread, machine
from benchmarks.peers.side import Reply, Resources, Side
from benchmarks.peers.transformers_side import BATCH_SIZE, ThisEnvironment
from benchmarks.quiet import MOST_ATTEMPTS, QuietWatch
from benchmarks.script_options import (
    COUNT,
    QUICK_HELP,
    QUICK_NOTE,
    OutputFile,
    OutputFolder,
    refuse_quick_docs,
)
from benchmarks.static_side import StaticEngineSide
from benchmarks.workload import mixed_workload

MIXED = WORKLOADS[0]
KV_BYTES = 512 * 2**20
LONG_QUANTILE = 0.75
"""Requests whose output is longer than that of this share of them are long."""
RESERVED_TOKENS = 2048
NUM_COUNTED_REQUESTS, NUM_COUNTED_BLOCKS, BLOCK_SIZE = 1024, 1024, 16
"""As `benchmarks.memory` counts by default."""
WARM_UP_PLAY = 1_000_000
PAGE, TABLE = "scaling.md", "static batching"


@dataclass(frozen=True, slots=True)
class Play:
    """One side's play of the whole workload; latencies in seconds, from when all were sent."""

    side: str
    round: int
    tokens_per_s: float
    latency_p50_s: float
    long_latency_p99_s: float
    foreign_share: float
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    figure: str
    octavo: str
    static: str
    ratio: float
    aim: str


@click.command()
@click.option("--rounds", default=5, show_default=True, type=COUNT, help="Plays of each side.")
@click.option("--quick", is_flag=True, help=QUICK_HELP)
@click.option("--json", "json_path", type=OutputFile(), help="Write figures here.")
@click.option("--docs", type=OutputFolder(PAGE), help="Write the page's table here.")
def main(rounds: int, quick: bool, json_path: Path | None, docs: Path | None) -> None:
    """Compare memory, latencies and output tokens per second."""
    refuse_quick_docs(quick, docs)
    resources = Resources(tuple(sorted(os.sched_getaffinity(0))), KV_BYTES)
    sides: tuple[Side, Side] = (
        OctavoSide(resources),
        StaticEngineSide(resources, ThisEnvironment()),
    )
    versions = {side.name: dict(side.install()) for side in sides}
    with started(sides):
        plays = [
            counted(side, round_number, quick) for round_number in range(rounds) for side in sides
        ]
    rows = [*memory_rows(), *play_rows(plays)]
    table = markdown_table(
        ["", "Octavo", f"static batches of {BATCH_SIZE}", "ratio", "aim"],
        [[row.figure, row.octavo, row.static, f"{row.ratio:.2f}", row.aim] for row in rows],
    )
    if quick:
        click.echo(QUICK_NOTE)
    click.echo(table)
    if json_path is not None:
        json_path.write_text(json.dumps(figures(plays, rows, versions), indent=2) + "\n")
    if docs is not None:
        write_table(docs / PAGE, TABLE, table)


@contextmanager
def started(sides: Sequence[Side]) -> Iterator[None]:
    """Start the sides, let each warm up with a few requests, and stop them at the end."""
    try:
        for side in sides:
            side.start()
            side.play(MIXED.load(WARM_UP_PLAY, True, None))
            side.pause()
        yield
    finally:
        for side in sides:
            side.stop()


def counted(side: Side, round_number: int, quick: bool) -> Play:
    """Play until a play was quiet, at most `MOST_ATTEMPTS` times; return the last."""
    side.resume()
    for attempt in range(1 if quick else MOST_ATTEMPTS):
        load = MIXED.load(round_number * MOST_ATTEMPTS + attempt, quick, None)
        with QuietWatch(roots=[side.process_id]) as watch:
            replies = side.play(load)
        check(load, replies)
        ends_s = batch_ends_s(replies) if side.name == StaticEngineSide.name else ends_of(replies)
        play = summary(side.name, round_number, load, ends_s, watch)
        void = "" if play.is_valid else "  VOID: the machine was busy"
        click.echo(
            f"{play.side:8} {play.tokens_per_s:7.1f} tokens/s  p50 {play.latency_p50_s:6.2f} s  "
            f"long p99 {play.long_latency_p99_s:6.2f} s  others {play.foreign_share:5.1%}{void}"
        )
        if play.is_valid:
            break
    side.pause()
    return play


def ends_of(replies: Sequence[Reply]) -> list[float]:
    """Return when each answer was whole."""
    return [reply.token_s[-1] for reply in replies]


def batch_ends_s(replies: Sequence[Reply], size: int = BATCH_SIZE) -> list[float]:
    """Return when each answer was sent: when the longest of its batch was whole."""
    ends_s = ends_of(replies)
    batches = [ends_s[first : first + size] for first in range(0, len(ends_s), size)]
    return [max(batch) for batch in batches for _ in batch]


def summary(
    side: str, round_number: int, load: Load, ends_s: Sequence[float], watch: QuietWatch
) -> Play:
    """Return the figures of a play whose answers were sent at `ends_s`."""
    lengths = [job.num_output_tokens for job in load.jobs]
    limit = np.quantile(lengths, LONG_QUANTILE)
    long_s = [end for end, length in zip(ends_s, lengths, strict=True) if length >= limit]
    return Play(
        side,
        round_number,
        tokens_per_s=load.num_output_tokens / max(ends_s),
        latency_p50_s=statistics.median(ends_s),
        long_latency_p99_s=float(np.percentile(long_s, 99)),
        foreign_share=watch.foreign_share,
        is_valid=watch.is_valid,
    )


def memory_rows() -> list[Row]:
    """Count how many slots are filled of those held, and how many requests have room at once."""
    jobs = mixed_workload(0, NUM_COUNTED_REQUESTS)
    ours = paged(jobs, NUM_COUNTED_BLOCKS)
    theirs = contiguous(jobs, NUM_COUNTED_BLOCKS * BLOCK_SIZE, RESERVED_TOKENS)
    filled = ours.full_filled_share / ours.full_held_share
    padded = static_batches(jobs, BATCH_SIZE).filled_share
    return [
        Row(
            "KV memory that holds a token, of what is taken",
            f"{filled:.1%}",
            f"{padded:.1%}",
            filled / padded,
            "96 %",
        ),
        Row(
            f"requests at once in the same KV memory (theirs reserve {RESERVED_TOKENS:,} slots)",
            f"{ours.num_sequences:.1f}",
            f"{theirs.num_sequences:.1f}",
            ours.num_sequences / theirs.num_sequences,
            "at least 4.00",
        ),
    ]


def play_rows(plays: Sequence[Play]) -> list[Row]:
    """Return medians over the rounds in which both sides were quiet, and of the rounds' ratios.

    Where there is no such round, all count, and the figures are marked as void.
    """
    rounds: dict[int, dict[str, Play]] = {}
    for play in plays:
        rounds.setdefault(play.round, {})[play.side] = play
    all_pairs = [
        (sides[OctavoSide.name], sides[StaticEngineSide.name]) for sides in rounds.values()
    ]
    pairs = [pair for pair in all_pairs if all(play.is_valid for play in pair)]
    void = "" if pairs else "VOID: "
    return [
        _row(f"{void}{figure}", pairs or all_pairs, read, aim)
        for figure, read, aim in (
            ("request latency, p50, s", lambda play: play.latency_p50_s, "at most 0.39"),
            ("output tokens/s", lambda play: play.tokens_per_s, "at least 4.00"),
            (
                "latency of long requests, p99, s",
                lambda play: play.long_latency_p99_s,
                "at most 0.34",
            ),
        )
    ]


def _row(
    figure: str, pairs: Sequence[tuple[Play, Play]], read: Callable[[Play], float], aim: str
) -> Row:
    cells = []
    for values in zip(*((read(ours), read(theirs)) for ours, theirs in pairs), strict=True):
        spread = Spread(statistics.median(values), min(values), max(values), is_void=False)
        cells.append(spread.text(digits=1))
    ratio = statistics.median(read(ours) / read(theirs) for ours, theirs in pairs)
    return Row(figure, *cells, ratio, aim)


def figures(
    plays: Sequence[Play], rows: Sequence[Row], versions: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Return all that was measured, where, and with what."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions,
        "plays": [asdict(play) for play in plays],
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
