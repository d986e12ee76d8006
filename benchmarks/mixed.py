"""Octavo through its own Triton server by gRPC against transformers' static batches, in one run.

    python benchmarks/mixed.py --rounds 3

Both sides play the same 64 requests in turns (A B A B …). Every play of a side draws new prompts of
the same lengths, which no cache has seen. A round is void, and repeated, when other processes took
more than 5 % of the CPU. Prints a table and, with --json, writes every figure.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import transformers
from quiet import QuietWatch
from workload import Job, mixed_workload, with_new_prompts

import octavo
from octavo.local.demo_model import demo_checkpoint
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer
from octavo_client import Client

STATIC_BATCH = 8
MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """One side's play of the whole workload."""

    side: str
    tokens_per_s: float
    wall_s: float
    foreign_share: float
    is_valid: bool


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Counted runs of each side.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(rounds: int, seed: int, json_path: Path | None) -> None:
    """Compare output tokens per second on the mixed workload."""
    jobs = mixed_workload(seed)
    model = str(demo_checkpoint())
    plays = itertools.count(1)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    click.echo(
        f"{len(jobs)} requests, {sum(len(j.prompt_token_ids) for j in jobs):,} prompt and "
        f"{num_tokens:,} output tokens"
    )
    runs: list[Run] = []
    options = ServerOptions(model=model, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        server.wait_ready(timeout_s=120)
        play_octavo(server, jobs)
        for _ in range(rounds):
            runs.append(
                counted(
                    "octavo",
                    lambda: play_octavo(server, with_new_prompts(jobs, next(plays))),
                    num_tokens,
                )
            )
            runs.append(counted("static", lambda: play_static(model, jobs), num_tokens))
    report(runs, json_path)


def counted(side: str, play: Callable[[], QuietWatch], num_tokens: int) -> Run:
    """Play until a run was quiet, at most `MOST_ATTEMPTS` times; return the last."""
    for _ in range(MOST_ATTEMPTS):
        watch = play()
        run = Run(
            side, num_tokens / watch.wall_s, watch.wall_s, watch.foreign_share, watch.is_valid
        )
        void = "" if run.is_valid else "  VOID: the machine was busy"
        click.echo(
            f"{side:8} {run.tokens_per_s:7.1f} tokens/s  {run.wall_s:6.1f} s  "
            f"others {run.foreign_share:5.1%} of the CPU{void}"
        )
        if run.is_valid:
            break
    return run


def play_octavo(server: TritonServer, jobs: list[Job]) -> QuietWatch:
    """Send all jobs at once over one gRPC connection, one stream each."""

    def ask(job: Job) -> int:
        deltas = client.stream(
            input_ids=job.prompt_token_ids,
            max_tokens=job.num_output_tokens,
            temperature=0,
            ignore_eos=True,
        )
        return sum(delta.num_output_tokens for delta in deltas)

    with (
        Client(server.grpc_url) as client,
        ThreadPoolExecutor(len(jobs)) as threads,
        QuietWatch(roots=[server.pid]) as watch,
    ):
        counts = list(threads.map(ask, jobs))
    assert counts == [job.num_output_tokens for job in jobs], "an answer has the wrong length"
    return watch


def play_static(model: str, jobs: list[Job]) -> QuietWatch:
    """Run the jobs in static batches in a process of their own; loading is not timed."""
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("static_baseline.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pairs = [(job.prompt_token_ids, job.num_output_tokens) for job in jobs]
        worker.stdin.write(
            json.dumps({"model": model, "batch_size": STATIC_BATCH, "jobs": pairs}) + "\n"
        )
        worker.stdin.flush()
        worker.stdout.readline()
        with QuietWatch() as watch:
            worker.stdin.write("go\n")
            worker.stdin.flush()
            json.loads(worker.stdout.readline())
    return watch


def report(runs: list[Run], json_path: Path | None) -> None:
    """Print medians and the ratio of valid runs."""
    medians = {}
    for side in ("octavo", "static"):
        values = [run.tokens_per_s for run in runs if run.side == side and run.is_valid]
        if not values:
            raise click.ClickException(f"no run of {side} had the machine to itself")
        medians[side] = statistics.median(values)
        click.echo(
            f"{side:8} median {medians[side]:7.1f}  from {min(values):.1f} to "
            f"{max(values):.1f} tokens/s over {len(values)} runs"
        )
    ratio = medians["octavo"] / medians["static"]
    click.echo(f"ratio    {ratio:.2f}")
    if json_path:
        figures = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": platform.processor() or platform.machine(),
            "versions": {
                "octavo": octavo.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "runs": [asdict(run) for run in runs],
            "medians": medians,
            "ratio": ratio,
        }
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
