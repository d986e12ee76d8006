"""Curves of the demo model behind its own server: over concurrent requests, and over the pool.

`octavo bench` sends the requests, through gRPC.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.curves import Curve, Line, Panel, Point
from benchmarks.demo_server import serving
from benchmarks.quiet import quietly

from octavo.local.triton_server import TritonServer

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_BLOCKS = (64, 96, 128, 192, 256, 512, 1024, 2048)
LEAST_REQUESTS, MOST_REQUESTS = 8, 512
"""Of a point; between these it is three for each client."""


def over_concurrency(quick: bool) -> Iterator[Point]:
    """Let 1 to 256 clients ask one server that has a seat for each."""
    clients = CONCURRENCIES[:3] if quick else CONCURRENCIES
    with serving({"max_num_seqs": max(CONCURRENCIES), "num_kv_blocks": 4096}) as server:
        for count in clients:
            figures = ask(
                server,
                concurrency=count,
                requests=min(max(3 * count, LEAST_REQUESTS), MOST_REQUESTS),
                prompt_tokens="64-128",
                output_tokens="24-72",
            )
            yield {"clients": count, **figures}


def over_pool(quick: bool) -> Iterator[Point]:
    """Let 64 clients ask servers that have 64 to 2,048 blocks for keys and values."""
    for num_blocks in POOL_BLOCKS[::4] if quick else POOL_BLOCKS:
        with serving({"num_kv_blocks": num_blocks}) as server:
            figures = ask(
                server,
                concurrency=64,
                requests=8 if quick else 96,
                prompt_tokens="16-512:96",
                output_tokens="8-256:64",
            )
        yield {"blocks": num_blocks, **figures}


def ask(server: TritonServer, **options: str | int) -> Point:
    """Run `octavo bench` with these options until the machine was quiet meanwhile."""
    told, watch = quietly(lambda: _bench(server, options))
    report = told["report"]
    return {
        "tokens_per_s": report["output_tokens_per_s"],
        "between_tokens_s": report["inter_token_s"]["mean"],
        "first_token_p50_s": report["time_to_first_token_s"]["p50"],
        "first_token_p99_s": report["time_to_first_token_s"]["p99"],
        "preemptions": told["server"]["counted"]["preemptions_total"],
        "foreign_share": watch.foreign_share,
    }


def _bench(server: TritonServer, options: dict[str, str | int]) -> dict[str, Any]:
    given = {
        **options,
        "url": server.grpc_url,
        "metrics_url": server.metrics_url,
        "warm_up": 4,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    octavo = Path(sys.executable).with_name("octavo")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [str(octavo), "bench", *words, f"--json={path}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(path.read_text())
    return told


LATENCIES = Panel(
    "ms",
    (
        Line("first_token_p50_s", "first token, p50", 1e3),
        Line("first_token_p99_s", "first token, p99", 1e3),
        Line("between_tokens_s", "each further token, mean", 1e3, 1),
    ),
    is_log=True,
)
THROUGHPUT = Panel("output tokens/s", (Line("tokens_per_s", ""),))
CONCURRENCY = Curve(
    "concurrency", "clients", "requests at once", (THROUGHPUT, LATENCIES), over_concurrency
)
POOL = Curve(
    "pool",
    "blocks",
    "blocks of 16 tokens",
    (THROUGHPUT, Panel("preemptions", (Line("preemptions", ""),)), LATENCIES),
    over_pool,
)
