"""Queues with limits: what is too much is refused at once and counted, and the rest runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, Unavailable

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
StartServer = Callable[..., TritonServer]

LONG = {"max_tokens": 30_000, "ignore_eos": True, "seed": 1}


@pytest.fixture
def server(start_server: StartServer, request: Any) -> TritonServer:
    """Return a server that runs one sequence at a time and limits its queue as the test asks."""
    return start_server(environment={"OCTAVO_MAX_NUM_SEQS": "1", **request.param})


@pytest.fixture
def taken(server: TritonServer, metrics: Metrics, become: Become) -> Iterator[Client]:
    """Return a client of a server whose only place is taken by a stream that must run on."""
    with Client(server.grpc_url, timeout_s=120) as client:
        running = client.stream(input_ids=[5] * 20, **LONG)
        next(running)
        yield client
        assert next(running).finish_reason is None
        running.close()
    assert become(lambda: metrics(server)["num_requests_running"] == 0)


@pytest.mark.parametrize("server", [{"OCTAVO_MAX_NUM_QUEUED_REQUESTS": "2"}], indirect=True)
def test_requests_beyond_the_queue_are_refused_at_once(
    server: TritonServer, taken: Client, metrics: Metrics, become: Become
) -> None:
    waiting = [taken.stream("x", max_tokens=3) for _ in range(2)]
    assert become(lambda: metrics(server)["num_requests_waiting"] == 2)
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(Unavailable, match="max_num_queued_requests"):
            taken.generate("x")
        assert time.monotonic() - started < 1.0
    name = "admission_rejections_total max_num_queued_requests"
    assert become(lambda: metrics(server)[name] == 3)
    assert metrics(server)["admission_rejections_total max_num_queued_tokens"] == 0
    for stream in waiting:
        stream.close()


@pytest.mark.parametrize("server", [{"OCTAVO_MAX_NUM_QUEUED_TOKENS": "100"}], indirect=True)
def test_tokens_beyond_the_queue_are_refused_at_once_but_never_those_of_one_alone(
    server: TritonServer, taken: Client, metrics: Metrics, become: Become
) -> None:
    alone = taken.stream(input_ids=[5] * 500, max_tokens=3)
    assert become(lambda: metrics(server)["num_requests_waiting"] == 1)
    with pytest.raises(Unavailable, match="max_num_queued_tokens"):
        taken.generate(input_ids=[5] * 10)
    assert become(lambda: metrics(server)["admission_rejections_total max_num_queued_tokens"] == 1)
    assert metrics(server)["admission_rejections_total max_num_queued_requests"] == 0
    alone.close()


@pytest.mark.parametrize("server", [{"OCTAVO_SCHEDULING_POLICY": "priority"}], indirect=True)
def test_lower_priority_runs_first(server: TritonServer, taken: Client) -> None:
    """It takes the only place from a stream of priority 0, which goes on afterwards."""
    urgent = taken.generate("x", max_tokens=3, ignore_eos=True, priority=-1)
    assert urgent.num_output_tokens == 3
