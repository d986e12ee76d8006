"""A client that is killed, and requests that are dropped while their KV is off the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]

LONG = {"max_tokens": 20_000, "ignore_eos": True, "temperature": 1, "seed": 1}
#: A program that reads the first deltas of two streams, asks for a third, and waits to be killed.
READER = """
import sys, time
from octavo_client import Client
client = Client(sys.argv[1], timeout_s=300)
def start():
    return client.stream(input_ids=[7] * 20, max_tokens=20_000, ignore_eos=True)
streams = [start(), start()]
for stream in streams:
    next(stream)
streams.append(start())
print("reading", flush=True)
time.sleep(300)
"""
#: What takes two steps may take long on a machine that is busy with other work.
BOUND_S = 20.0


def is_idle(figures: dict[str, float]) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
    names += ("kv_blocks_used", "cpu_kv_blocks_used")
    return not any(figures[name] for name in names)


def test_a_killed_client_frees_its_blocks_and_its_place_in_the_queue(
    narrow_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    command = [sys.executable, "-c", READER, narrow_server.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        assert become(lambda: metrics(narrow_server)["num_requests_waiting"] == 1)
        assert become(lambda: metrics(narrow_server)["num_requests_running"] == 2)
        reader.kill()
    assert become(lambda: is_idle(metrics(narrow_server)), BOUND_S)


def test_a_dropped_request_leaves_nothing_on_the_host_while_it_is_swapped_out(
    start_server: StartServer, metrics: Metrics, become: Become
) -> None:
    """Two need more blocks than there are, so one waits in host memory, and they take turns."""
    environment = {"OCTAVO_NUM_KV_BLOCKS": "80", "OCTAVO_PREEMPTION_MODE": "swap"}
    server = start_server(environment=environment)
    with Client(server.grpc_url, timeout_s=120) as client:
        streams = [client.stream(input_ids=[7] * 500, **{**LONG, "max_tokens": 760})]
        next(streams[0])
        streams.append(client.stream(input_ids=[8] * 500, **{**LONG, "max_tokens": 760}))
        assert become(lambda: metrics(server)["num_requests_swapped"] == 1)
        streams[1].close()
        assert become(lambda: metrics(server)["num_requests_swapped"] == 0, BOUND_S)
        streams[0].close()
    assert become(lambda: is_idle(metrics(server)), BOUND_S)
    assert become(lambda: metrics(server)["preemptions_total swap"] >= 1)
