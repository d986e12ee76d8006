"""What clients, metrics and the server see when a process of the server is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest, RequestTimeout, Unavailable

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
FindProcess = Callable[[TritonServer, str], psutil.Process]

OCTAVO = Path(sys.executable).parent / "octavo"
ENGINE = "octavo.engine_process"
STUB = "triton_python_backend_stub"
SHORT = {"max_tokens": 16, "seed": 1, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True}
#: What no limit of the grammar library bounds.
SLOW_SCHEMA = {"type": "integer", "multipleOf": 99_999_989}


def probe(server: TritonServer, which: str) -> subprocess.CompletedProcess[str]:
    """Run `octavo health` as a container does."""
    command = [OCTAVO, "health", "--url", server.grpc_url, which]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def endless_streams(client: Client, count: int, **options: Any) -> list[Any]:
    """Open streams that run for minutes, and read a little of each."""
    streams = [client.stream("a", **LONG, **options) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def test_killed_engine_fails_its_requests_at_once_and_comes_back_by_itself(
    start_server: StartServer, find_process: FindProcess, metrics: Metrics, become: Become
) -> None:
    server = start_server()
    with Client(server.grpc_url, timeout_s=60) as client:
        before = client.generate("a", **SHORT)
        streams = endless_streams(client, 4)
        find_process(server, ENGINE).kill()
        killed_s = time.monotonic()
        for stream in streams:
            with pytest.raises(Unavailable, match=r"engine process died \(signal 9, SIGKILL\)"):
                list(stream)
        with pytest.raises(Unavailable, match="engine is restarting"):
            client.generate("a", **SHORT)
        assert time.monotonic() - killed_s < 2.0
        assert become(lambda: metrics(server)["engine_up"] == 0)
        assert become(lambda: metrics(server)["kv_blocks_used"] == 0)
        assert become(lambda: metrics(server)["engine_up"] == 1, 60.0)
        assert client.generate("a", **SHORT) == before
        find_process(server, ENGINE).kill()
        assert become(lambda: metrics(server)["engine_up"] == 0), "killed while idle"
        assert become(lambda: metrics(server)["engine_up"] == 1, 60.0)
        assert become(lambda: metrics(server)["engine_restarts_total"] == 2)
        assert client.generate("a", **SHORT) == before
    assert become(lambda: metrics(server)["kv_blocks_used"] == 0)


def test_a_frozen_engine_is_not_ready_then_killed_and_comes_back(
    start_server: StartServer, find_process: FindProcess, metrics: Metrics, become: Become
) -> None:
    server = start_server(environment={"OCTAVO_STEP_TIMEOUT_S": "4"})
    with Client(server.grpc_url, timeout_s=60) as client:
        before = client.generate("a", **SHORT)
        assert probe(server, "--live").returncode == probe(server, "--ready").returncode == 0
        with pytest.raises(InvalidRequest, match="takes more than 5 s"):
            client.generate("a", structured_outputs={"json": SLOW_SCHEMA})
        (stream,) = endless_streams(client, 1)
        find_process(server, ENGINE).suspend()
        assert become(lambda: client.engine_health().is_frozen)
        assert probe(server, "--ready").stderr == "Error: the engine is frozen\n"
        with pytest.raises(Unavailable, match=r"did not answer within step_timeout_s \(4 s\)"):
            list(stream)
        assert probe(server, "--live").stdout.endswith("is restarting its engine by itself\n")
        assert become(lambda: metrics(server)["engine_up"] == 1, 60.0)
        assert client.generate("a", **SHORT) == before


def test_killed_stub_takes_the_engine_along_and_no_client_hangs(
    start_server: StartServer, find_process: FindProcess, become: Become
) -> None:
    """This version of the server never replaces a stub, and goes on to say that it is ready.

    It tells the next caller, but not those whose streams are open: their own time limit ends them.
    Now and then it ends itself instead, and then everybody is told at once.
    """
    server = start_server(grace_s=1.0)
    engine = find_process(server, ENGINE)
    with Client(server.grpc_url) as client:
        (stream,) = endless_streams(client, 1, timeout_s=8)
        assert probe(server, "--live").returncode == 0
        find_process(server, STUB).kill()
        assert probe(server, "--live").returncode == 1
        with pytest.raises(Unavailable, match=r"is not healthy|no gRPC server answers"):
            client.generate("a", **SHORT, timeout_s=30)
        with pytest.raises((RequestTimeout, Unavailable)):
            list(stream)
    assert become(lambda: not engine.is_running())
    assert not server.stop(), "the server alone waits for the dead stub for ever"


def test_killed_server_ends_streams_at_once_and_leaves_nothing(
    start_server: StartServer, watch_leftovers: Callable[[TritonServer], Any], become: Become
) -> None:
    server = start_server()
    leftovers = watch_leftovers(server)
    with Client(server.grpc_url) as client:
        streams = endless_streams(client, 4)
        psutil.Process(server.pid).kill()
        killed_s = time.monotonic()
        for stream in streams:
            with pytest.raises(Unavailable):
                list(stream)
        assert time.monotonic() - killed_s < 2.0
    assert become(lambda: server.poll() is not None)
    assert leftovers() == []
