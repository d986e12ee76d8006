"""What the engine's options cost and gain: curves of the mixed workload over one option at a time.

    python benchmarks/tuning.py --json docs/images/tuning.json --plots docs/images

Every point is a server of its own that plays the same 64 requests at once through gRPC, and then
the same requests at 80 % of the default's throughput with Poisson arrivals. A point is played again
when other processes took more than 5 % of the CPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
from demo_server import serving
from matplotlib import pyplot as plt
from quiet import MOST_ATTEMPTS, QuietWatch
from script_options import OutputFile, OutputFolder
from workload import Job, mixed_workload

from octavo.local.triton_server import TritonServer
from octavo_client import Client

LOAD = 0.8
"""Arrivals of the paced play, as a share of what the default options manage at once."""
SEED = 0
NUM_WARM_UP = 8
"""Requests that a new server answers before it is measured."""
#: Option to its values; the first is the default's.
SWEEPS: dict[str, tuple[int, ...]] = {
    "max_num_seqs": (64, 4, 8, 16, 32),
    "max_num_batched_tokens": (512, 64, 128, 256, 1024, 2048),
    "num_kv_blocks": (2048, 64, 96, 128, 256, 512, 1024),
    "block_size": (16, 8, 32, 64, 128),
}


@dataclass(frozen=True, slots=True)
class Play:
    """One play of the workload; latencies in seconds."""

    tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    between_tokens_p50_s: float
    between_tokens_p99_s: float
    foreign_share: float


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one option: all requests at once, and paced."""

    option: str
    value: int
    at_once: Play
    paced: Play


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(SWEEPS)), help="These options only.")
@click.option("--json", "json_path", type=OutputFile(), help="Write figures here.")
@click.option("--plots", type=OutputFolder(), help="Write one plot an option here.")
def main(only: tuple[str, ...], json_path: Path | None, plots: Path | None) -> None:
    """Measure throughput and latencies over engine options."""
    jobs = mixed_workload(SEED)
    rate = LOAD * default_rate(jobs)
    click.echo(f"{len(jobs)} requests; paced: {rate:.2f} requests/s")
    points = []
    for option in only or tuple(SWEEPS):
        for value in sorted(SWEEPS[option]):
            points.append(measure(option, value, jobs, rate))
            click.echo(line(points[-1]))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n")
    if plots is not None:
        for option in {point.option for point in points}:
            draw([p for p in points if p.option == option], plots / f"tuning-{option}.png")


def default_rate(jobs: list[Job]) -> float:
    """Return the requests per second that the default options manage when all come at once."""
    with serving({}) as server:
        play(server, jobs, None)
        seconds = [play_quietly(server, jobs, None)[1] for _ in range(2)]
    return len(jobs) / min(seconds)


def measure(option: str, value: int, jobs: list[Job], rate: float) -> Point:
    """Serve with one option set, and play both forms."""
    options = {option: value}
    if option == "max_num_batched_tokens":
        # The budget must have room for every sequence.
        options["max_num_seqs"] = min(64, value)
    with serving(options) as server:
        play(server, jobs[:NUM_WARM_UP], None)
        at_once, _ = play_quietly(server, jobs, None)
        paced, _ = play_quietly(server, jobs, rate)
    return Point(option, value, at_once, paced)


def play_quietly(server: TritonServer, jobs: list[Job], rate: float | None) -> tuple[Play, float]:
    """Play until the machine was quiet; return the last play and its seconds."""
    for _ in range(MOST_ATTEMPTS):
        result, watch = play(server, jobs, rate)
        if watch.is_valid:
            break
    return result, watch.wall_s


def play(server: TritonServer, jobs: list[Job], rate: float | None) -> tuple[Play, QuietWatch]:
    """Send the jobs, at once or with Poisson arrivals of `rate` a second; return what was seen."""
    gaps = np.zeros(len(jobs)) if rate is None else _gaps(rate, len(jobs))
    arrivals = np.cumsum(gaps).tolist()

    def ask(job: Job, arrival_s: float) -> list[float]:
        time.sleep(max(0.0, started_s + arrival_s - time.monotonic()))
        times = [time.monotonic()]
        for delta in client.stream(
            input_ids=job.prompt_token_ids,
            max_tokens=job.num_output_tokens,
            temperature=0,
            ignore_eos=True,
        ):
            times += [time.monotonic()] * delta.num_output_tokens
        return times

    with (
        Client(server.grpc_url) as client,
        ThreadPoolExecutor(len(jobs)) as threads,
        QuietWatch(roots=[server.pid]) as watch,
    ):
        started_s = time.monotonic()
        times = list(threads.map(ask, jobs, arrivals))
    return _summary(times, watch), watch


def _gaps(rate: float, count: int) -> Any:
    return np.random.default_rng(SEED).exponential(1.0 / rate, size=count)


def _summary(times: Sequence[list[float]], watch: QuietWatch) -> Play:
    """Return the figures of a play: of each request, when it was sent and when each token came."""
    first = [each[1] - each[0] for each in times]
    between = [later - sooner for each in times for sooner, later in pairwise(each[1:])]
    return Play(
        tokens_per_s=sum(len(each) - 1 for each in times) / watch.wall_s,
        first_token_p50_s=statistics.median(first),
        first_token_p99_s=float(np.percentile(first, 99)),
        between_tokens_p50_s=statistics.median(between),
        between_tokens_p99_s=float(np.percentile(between, 99)),
        foreign_share=watch.foreign_share,
    )


def line(point: Point) -> str:
    """Return a point as a line of a table."""
    once, paced = point.at_once, point.paced
    return (
        f"{point.option:24} {point.value:6,}  {once.tokens_per_s:7.0f} tokens/s  paced: first "
        f"{paced.first_token_p50_s * 1e3:6.0f} / {paced.first_token_p99_s * 1e3:6.0f} ms, between "
        f"{paced.between_tokens_p50_s * 1e3:5.1f} / {paced.between_tokens_p99_s * 1e3:5.1f} ms"
        f"  (others {max(once.foreign_share, paced.foreign_share):.1%})"
    )


def draw(points: list[Point], path: Path) -> None:
    """Plot throughput at once, and paced latencies, over the values of one option."""
    values = [point.value for point in points]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.2), layout="constrained")
    left.plot(values, [point.at_once.tokens_per_s for point in points], "o-")
    left.set(ylabel="output tokens/s, 64 requests at once", ylim=(0, None))
    for name, label in (
        ("first_token_p50_s", "first token, p50"),
        ("first_token_p99_s", "first token, p99"),
        ("between_tokens_p50_s", "between tokens, p50"),
        ("between_tokens_p99_s", "between tokens, p99"),
    ):
        right.plot(
            values, [getattr(point.paced, name) * 1e3 for point in points], "o-", label=label
        )
    right.set(ylabel="ms, paced arrivals", yscale="log")
    right.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axes in (left, right):
        axes.set(xlabel=points[0].option, xscale="log")
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
