"""`octavo bench` against a real server: what it asks for is what it gets and counts."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.local.triton_server import TritonServer
from octavo_client.bench.lengths import Lengths
from octavo_client.bench.workload import Job, Workload, draw_jobs

pytestmark = pytest.mark.e2e

NUM_WARM_UP = 2
NUM_REQUESTS = 12
WORKLOAD = Workload(
    Lengths.parse("40-200:80"), Lengths.parse("8-24"), shared_prefix=0.5, cancel_share=0.3, seed=1
)
OPTIONS = (
    f"--prompt-tokens {WORKLOAD.prompt_tokens.text} --output-tokens {WORKLOAD.output_tokens.text} "
    f"--shared-prefix {WORKLOAD.shared_prefix} --cancel {WORKLOAD.cancel_share} "
    f"--seed {WORKLOAD.seed} --warm-up {NUM_WARM_UP} --requests {NUM_REQUESTS}"
).split()


def bench(server: TritonServer, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and what it writes as JSON."""
    address = ("--url", server.grpc_url, "--metrics-url", server.metrics_url, "--json", "-")
    result = CliRunner().invoke(main, ["bench", *address, *options])
    return result.exit_code, json.loads(result.stdout)


def lengths(jobs: list[Job]) -> list[tuple[int, int]]:
    return sorted((len(job.prompt), job.num_output_tokens) for job in jobs)


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "50")])
def test_every_answer_has_its_length_and_planned_cancels_are_all_that_is_cut(
    tiny_server: TritonServer, load: tuple[str, str]
) -> None:
    exit_code, written = bench(tiny_server, *OPTIONS, *load)
    report, requests = written["report"], written["requests"]
    assert (exit_code, report["failures"], len(requests)) == (0, {}, NUM_REQUESTS)
    jobs = list(islice(draw_jobs(WORKLOAD), NUM_WARM_UP, NUM_WARM_UP + NUM_REQUESTS))
    whole = [request for request in requests if request["outcome"] == "ok"]
    received = [
        (request["num_input_tokens"], sum(count for _, count in request["arrivals"]))
        for request in whole
    ]
    # A job to be cancelled may be whole when its cancel would come, as joined tokens overtake it.
    assert set(lengths([job for job in jobs if job.cancel_after is None])) <= set(received)
    assert set(received) <= set(lengths(jobs))
    assert report["num_ok"] + report["num_cancelled"] == NUM_REQUESTS
    assert report["num_cancelled"] <= sum(job.cancel_after is not None for job in jobs)
    assert report["output_tokens_per_s"] * report["duration_s"] == pytest.approx(
        report["num_output_tokens"]
    )


def test_prefixes_that_are_shared_are_found_and_the_server_counts_them_too(
    tiny_server: TritonServer,
) -> None:
    _, written = bench(tiny_server, *OPTIONS, "--cancel", "0", "--seed", "2")
    counted, requests = written["server"]["counted"], written["requests"]
    assert 0.2 < written["report"]["cached_share"] < 0.5
    assert counted["prefix_cache_hits_total"] == sum(each["cached_tokens"] for each in requests)
    assert counted["prefix_cache_queries_total"] == sum(
        each["num_input_tokens"] for each in requests
    )


def test_requests_that_the_server_refuses_are_counted_by_its_code(
    tiny_server: TritonServer,
) -> None:
    exit_code, written = bench(tiny_server, "--requests", "3", "--prompt-tokens", "40000")
    assert (exit_code, written["report"]["failures"]) == (1, {"INVALID_ARG": 3})
