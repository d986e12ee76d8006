"""What others read of the metrics endpoint, and what it says when models come and go."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
Post = Callable[..., tuple[int, str]]
StartServer = Callable[..., TritonServer]
FindProcesses = Callable[[TritonServer, str], list[psutil.Process]]

EXPLICIT = ("--model-control-mode=explicit", "--load-model=octavo")


@pytest.fixture(scope="session")
def families() -> Callable[[TritonServer], dict[str, Metric]]:
    """Return a function that reads all metrics as Prometheus does, by name."""

    def read(server: TritonServer) -> dict[str, Metric]:
        with urllib.request.urlopen(server.metrics_url, timeout=10.0) as answer:
            text = answer.read().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    return read


def test_all_that_is_ours_can_be_read_by_prometheus_and_has_its_labels(
    tiny_server: TritonServer, families: Callable[[TritonServer], dict[str, Metric]]
) -> None:
    ours = {
        name: family
        for name, family in families(tiny_server).items()
        if name.startswith(("octavo_", "nv_trt_llm_"))
    }
    kinds = [family.type for family in ours.values()]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    assert counts == {"counter": 11, "gauge": 14, "histogram": 8}
    for family in ours.values():
        for sample in family.samples:
            assert (sample.labels["model"], sample.labels["version"]) == ("octavo", "1")


def test_the_load_that_the_server_puts_into_headers_can_be_read_from_the_block_family(
    tiny_server: TritonServer, families: Callable[[TritonServer], dict[str, Metric]]
) -> None:
    """Servers from 25.03 on look for these labels; the one bundled here has no such header."""
    family = families(tiny_server)["nv_trt_llm_kv_cache_block_metrics"]
    blocks = {sample.labels["kv_cache_block_type"]: sample.value for sample in family.samples}
    assert blocks["max"] * blocks["tokens_per"] == 8192 * 16, "max_token_capacity"
    assert blocks["used"] / blocks["max"] == blocks["fraction"], "kv_cache_utilization"
    assert blocks["used"] + blocks["free"] == blocks["max"]


def test_counters_go_on_over_unload_and_reload_and_gauges_are_of_who_serves(
    start_server: StartServer,
    post: Post,
    metrics: Metrics,
    find_processes: FindProcesses,
    become: Become,
) -> None:
    server = start_server(flags=EXPLICIT)

    def serve_one() -> None:
        with Client(server.grpc_url, timeout_s=60) as client:
            client.generate("x", max_tokens=4, ignore_eos=True)

    def shows(engine_up: int, num_requests: int) -> bool:
        figures = metrics(server)
        return (figures["engine_up"], figures["requests_total length"]) == (engine_up, num_requests)

    serve_one()
    with urllib.request.urlopen(f"{server.http_url}/v2/models/octavo/config") as answer:
        config = json.load(answer)
    config["parameters"] = {"num_kv_blocks": {"string_value": "100"}}
    changed = {"parameters": {"config": json.dumps(config)}}
    assert post(server, "repository/models/octavo/load", changed)[0] == 200
    serve_one()
    # The instance with the old options writes its last figures after the new one has begun.
    assert become(lambda: len(find_processes(server, "octavo.engine_process")) == 1)
    assert become(lambda: shows(1, 2))
    assert post(server, "repository/models/octavo/unload", {})[0] == 200
    assert become(lambda: shows(0, 2))
    assert become(lambda: metrics(server)["kv_blocks_total"] == 0)
    assert post(server, "repository/models/octavo/load", {})[0] == 200
    serve_one()
    assert become(lambda: shows(1, 3))
    assert become(lambda: metrics(server)["generation_tokens_total"] == 12)
