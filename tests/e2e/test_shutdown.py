"""SIGTERM while streams run; nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, Completion, OctavoClientError, Unavailable

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Become = Callable[..., bool]
WatchLeftovers = Callable[[TritonServer], Callable[[], list[str]]]

SHORT = {"max_tokens": 16, "seed": 1, "ignore_eos": True}
# Takes about a second: long enough to be in the middle of it, short enough to wait for.
MEDIUM = {"max_tokens": 600, "seed": 1, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True}


def begun(client: Client, count: int, params: dict[str, Any]) -> list[Any]:
    """Open streams and read the first delta of each."""
    streams = [client.stream("a", **params) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def num_tokens(stream: Any) -> int:
    return sum(delta.num_output_tokens for delta in stream)


def test_sigterm_lets_running_streams_finish(
    start_server: StartServer, watch_leftovers: WatchLeftovers, become: Become
) -> None:
    server = start_server(grace_s=60.0)
    leftovers = watch_leftovers(server)
    with Client(server.grpc_url, timeout_s=120) as client, ThreadPoolExecutor(4) as readers:
        streams = begun(client, 4, MEDIUM)
        counts = [readers.submit(num_tokens, stream) for stream in streams]
        os.kill(server.pid, signal.SIGTERM)
        assert become(lambda: not client.is_ready())
        with pytest.raises(Unavailable):
            client.generate("a", **SHORT)
        # Each of them has read at least one token before.
        assert all(500 < count.result(timeout=120) < 600 for count in counts)
    assert become(lambda: server.poll() is not None, 30.0)
    assert leftovers() == []


def test_stop_ends_streams_that_outlast_the_grace_period(
    start_server: StartServer, watch_leftovers: WatchLeftovers
) -> None:
    server = start_server(grace_s=1.0)
    leftovers = watch_leftovers(server)
    with Client(server.grpc_url, timeout_s=120) as client:
        streams = begun(client, 4, LONG)
        started_s = time.monotonic()
        assert not server.stop(), "streams outlasted the grace period"
        assert time.monotonic() - started_s < 10.0
        for stream in streams:
            with pytest.raises(OctavoClientError):
                list(stream)
    assert leftovers() == []


def test_stop_tells_the_model_which_ends_streams_after_the_drain_timeout(
    start_server: StartServer, watch_leftovers: WatchLeftovers
) -> None:
    server = start_server(grace_s=8.0, environment={"OCTAVO_DRAIN_TIMEOUT_S": "1"})
    leftovers = watch_leftovers(server)
    with Client(server.grpc_url, timeout_s=120) as client, ThreadPoolExecutor(1) as stopper:
        streams = begun(client, 4, LONG)
        stopped = stopper.submit(server.stop)
        for stream in streams:
            with pytest.raises(Unavailable, match="the server stops before the request is finish"):
                list(stream)
        assert not stopped.done(), "the model ended the streams, and not the end of the server"
        # Whether Triton then leaves by itself is a race of its own; the launcher bounds it.
        stopped.result(timeout=20.0)
    assert leftovers() == []


def test_two_servers_run_side_by_side(tiny_server: TritonServer, start_server: StartServer) -> None:
    other = start_server()
    with Client(tiny_server.grpc_url, timeout_s=60) as one, Client(other.grpc_url) as two:
        streams = [client.stream("a", **MEDIUM) for client in (one, two)]
        answers = [Completion.from_deltas(stream) for stream in streams]
        assert answers[0] == answers[1]
        (stream,) = begun(one, 1, MEDIUM)
        assert other.stop()
        assert 500 < num_tokens(stream) < 600
