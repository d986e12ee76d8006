"""A model that no part of its server can heal is served again: what `octavo serve` looks for."""

from __future__ import annotations

import functools
import queue
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from octavo.local import supervisor
from octavo.local.server_watch import ServerWatch
from octavo.local.supervisor import Supervisor
from octavo.local.triton_server import TritonServer
from octavo.restart_policy import RestartPolicy
from octavo_client import Client
from octavo_client.cli_options import Connection
from octavo_client.health_command import find_fault

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Become = Callable[..., bool]
FindProcess = Callable[[TritonServer, str], psutil.Process]


def test_a_model_whose_stub_hangs_is_served_again_by_a_new_server(
    start_server: StartServer,
    find_process: FindProcess,
    become: Become,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often = functools.partial(ServerWatch, check_interval_s=0.1)
    monkeypatch.setattr(supervisor, "ServerWatch", often)
    server = start_server()
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    lines: list[str] = []
    keeper = Supervisor(
        server,
        RestartPolicy(1, 0.1),
        signals,
        say=lambda _, line: lines.append(line),
        probe=lambda: find_fault(Connection(server.grpc_url), timeout_s=2.0),
    )
    stub = find_process(server, "triton_python_backend_stub")
    with ThreadPoolExecutor(1) as pool:
        keeping = pool.submit(keeper.run)
        try:
            stub.suspend()
            assert become(lambda: bool(lines) and lines[-1].startswith("ready again"), 60.0), lines
            assert not stub.is_running()
            with Client(server.grpc_url, timeout_s=60) as client:
                client.health()
        finally:
            signals.put(signal.SIGTERM)
        keeping.result(timeout=60.0)
    assert lines[0].startswith("the model's stub process gives no sign of life; the server is")
