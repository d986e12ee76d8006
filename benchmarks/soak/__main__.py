"""Runs the soak: starts a server, measures its capacity, loads it, breaks it, and reports."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from benchmarks.quiet import QuietWatch
from benchmarks.script_options import Amount, OutputFile
from benchmarks.soak import processes, report
from benchmarks.soak.faults import Outage, Schedule, play
from benchmarks.soak.processes import Held
from benchmarks.soak.report import Promise
from benchmarks.soak.traffic import Traffic
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient

LOAD_SHARE = 0.9
NUM_AT_A_TIME = 32
MOST_GROWTH = 0.02
#: A stub starts the threads for long prompts when the first one comes.
MORE_THREADS = 2
EXPLICIT = ("--model-control-mode=explicit", "--load-model=octavo")
#: Few enough blocks that all of them have been written when the processes count as warm.
ENVIRONMENT = {"OCTAVO_NUM_KV_BLOCKS": "640", "OCTAVO_SWAP_SPACE_BYTES": str(2**25)}
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")


@dataclass(slots=True)
class Soak:
    """One run: what it is asked, and what it has seen."""

    server: TritonServer
    schedule: Schedule
    capacity_s: float
    warm_up_s: float
    promises: list[Promise] = field(default_factory=list)
    samples: list[Held] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    capacity: float = 0.0

    async def run(self) -> None:
        """Play it from start to end."""
        async with (
            AsyncClient(self.server.grpc_url) as client,
            AsyncClient(self.server.grpc_url) as prober,
        ):
            warm_up = Traffic(client)
            self.capacity = await warm_up.measure_capacity(NUM_AT_A_TIME, self.capacity_s)
            before = await self._settle()
            traffic = Traffic(client)
            start_s = time.monotonic()
            end_s = start_s + self.schedule.duration_s
            sampling = asyncio.create_task(processes.sample(self.server, self.samples))
            faults = asyncio.create_task(play(self.schedule, self.server, prober, start_s))
            await traffic.keep_up(LOAD_SHARE * self.capacity, end_s)
            self.outages = await faults
            sampling.cancel()
            self.promises += report.judge_requests(
                [*warm_up.records, *traffic.records], self.outages
            )
            self.promises += report.judge_recovery(traffic.tokens, self.outages, start_s, end_s)
            self._judge_leaks(before, await self._settle())

    async def _settle(self) -> Idle:
        """Wait until nothing runs and what has ended is cleared away; return what is held then."""
        deadline = time.monotonic() + 20.0
        while any(gauges(self.server).values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        held = {held.role: held for held in processes.look(self.server)}
        num_engines = processes.count_engines(self.server)
        return Idle(held, gauges(self.server), num_engines, *processes.shared_memory(self.server))

    def _judge_leaks(self, before: Idle, after: Idle) -> None:
        left = {name: value for name, value in after.gauges.items() if value}
        # Triton 2.51 keeps the stub, without its engine, of an unloaded model of which a stream was
        # cancelled between its last response and its end.
        kept = self.schedule.num_reloads
        most_bytes = kept * before.shm_bytes // before.shm_files
        promises = [
            Promise("requests and blocks once idle", str(left or "none"), "none", not left),
            _compare("engine processes", before.num_engines, after.num_engines, 0),
            _compare("files of shared memory", before.shm_files, after.shm_files, kept),
            _compare("bytes of shared memory", before.shm_bytes, after.shm_bytes, most_bytes),
        ]
        for role in ("engine", "stub"):
            promises += self._judge_growth(role)
        was, now = before.held["server"], after.held["server"]
        promises.append(_compare("files of the server", was.num_files, now.num_files, 8))
        self.promises += promises

    def _judge_growth(self, role: str) -> list[Promise]:
        grown = processes.growth(self.samples, role, self.warm_up_s)
        if grown is None:
            lives = f"lives of the {role} long enough to see it grow"
            return [Promise(lives, "none", "1", is_kept=False, is_counted=False)]
        # A stub inherits files of the server when it starts, so each life is compared with itself.
        return [
            _at_most(f"threads that a warm {role} came to hold", grown.num_threads, MORE_THREADS),
            _at_most(f"files that a warm {role} came to hold", grown.num_files, 0),
            Promise(
                f"resident memory that a warm {role} came to hold",
                f"{grown.memory_share:+.2%}",
                f"at most {MOST_GROWTH:.0%} more",
                grown.memory_share <= MOST_GROWTH,
                is_counted=False,
            ),
        ]


@dataclass(frozen=True, slots=True)
class Idle:
    """What is held while nothing runs."""

    held: dict[str, Held]
    gauges: dict[str, float]
    num_engines: int
    shm_files: int
    shm_bytes: int


def _at_most(name: str, seen: int, most: int) -> Promise:
    return Promise(name, str(seen), f"at most {most}", seen <= most)


def _compare(name: str, before: int, after: int, slack: int) -> Promise:
    allowed = "no more than before" + (f" and {slack:,}" if slack else "")
    return Promise(name, f"{before:,} before, {after:,} after", allowed, after <= before + slack)


def gauges(server: TritonServer) -> dict[str, float]:
    """Return what must be 0 when the server is idle."""
    with urllib.request.urlopen(server.metrics_url, timeout=10.0) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return {name: values[f"octavo_{name}"] for name in IDLE_GAUGES}


@click.command()
@click.option(
    "--minutes", default=15.0, show_default=True, type=Amount(), help="Length of the load."
)
@click.option(
    "--kill-every",
    default=180.0,
    show_default=True,
    type=Amount(),
    help="Seconds between two kills.",
)
@click.option(
    "--reloads",
    default=2,
    show_default=True,
    type=click.IntRange(min=0),
    help="Times to unload and load.",
)
@click.option(
    "--capacity-s",
    default=30.0,
    show_default=True,
    type=Amount(),
    help="Seconds to find the capacity.",
)
@click.option(
    "--warm-up-s",
    default=60.0,
    show_default=True,
    type=Amount(zero=True),
    help="Age at which a process is warm.",
)
@click.option("--model", default="demo", show_default=True, help="Checkpoint to serve.")
@click.option("--json", "json_path", type=OutputFile(), help="Write everything here.")
def main(
    minutes: float,
    kill_every: float,
    reloads: int,
    capacity_s: float,
    warm_up_s: float,
    model: str,
    json_path: Path | None,
) -> None:
    """Load a server near its capacity, break it again and again, and say which promises hold."""
    options = ServerOptions(
        model=model,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment=ENVIRONMENT,
        flags=EXPLICIT,
    )
    schedule = Schedule(minutes * 60.0, kill_every, reloads)
    with TritonServer(options) as server:
        server.wait_ready()
        soak = Soak(server, schedule, capacity_s, warm_up_s)
        with QuietWatch([server.pid]) as watch:
            asyncio.run(soak.run())
        ended = server.poll()
        alive = Promise(
            "the server", "ended" if ended is not None else "lives", "lives", ended is None
        )
        soak.promises.append(alive)
    report.show(soak.promises, Console(width=120))
    load = f"capacity {soak.capacity:,.1f} requests/s, load {LOAD_SHARE:.0%} of it"
    click.echo(
        f"{load} for {minutes:g} min; other processes took {watch.foreign_share:.0%} of the CPU"
    )
    if json_path is not None:
        result = {
            "capacity_requests_per_s": soak.capacity,
            "foreign_cpu_share": watch.foreign_share,
            "promises": [asdict(promise) for promise in soak.promises],
            "outages": [asdict(outage) for outage in soak.outages],
            "samples": [asdict(held) for held in soak.samples],
        }
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(promise.is_kept for promise in soak.promises) else 1)


if __name__ == "__main__":
    main()
