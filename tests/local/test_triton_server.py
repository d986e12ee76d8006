"""A real server starts, answers and ends, and nothing of it outlives it whatever is killed."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from octavo.errors import ConfigError, LaunchError
from octavo.local.guardian import describe_exit
from octavo.local.server_log import LogRecord
from octavo.local.triton_server import TritonServer

pytestmark = pytest.mark.e2e

MakeServer = Callable[..., TritonServer]
Leftovers = Callable[[str], list[str]]
Become = Callable[[Callable[[], bool]], bool]


def post(url: str, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60.0) as answer:  # a load starts a process
        return bytes(answer.read())


def echo(server: TritonServer, text: str) -> str:
    answer = post(f"{server.http_url}/v2/models/echo/generate", {"text_input": text})
    return str(json.loads(answer)["text_output"])


def only_runtime(runtimes: Path) -> str:
    (runtime,) = runtimes.iterdir()
    return runtime.name


def test_server_answers_and_leaves_nothing_after_stop(
    make_server: MakeServer, runtimes: Path, leftovers: Leftovers
) -> None:
    with make_server(grace_s=10.0) as server:
        assert server.wait_ready(20.0)
        name = only_runtime(runtimes)
        assert echo(server, "héllo") == "héllo"
        with urllib.request.urlopen(server.metrics_url, timeout=5.0) as metrics:
            assert b"nv_inference_count" in metrics.read()
        assert len(leftovers(name)) >= 4, "server, stub, its child and shared memory"
    assert leftovers(name) == []
    assert list(runtimes.iterdir()) == []


def test_two_servers_run_side_by_side(make_server: MakeServer) -> None:
    one, two = make_server(), make_server()
    one.start()
    two.start()
    for server in (one, two):
        server.wait_ready(20.0)
    one.kill()
    assert echo(two, "still here") == "still here"


@pytest.mark.parametrize("kind", ["http", "grpc", "metrics"])
def test_taken_port_is_refused_before_anything_starts(
    make_server: MakeServer, runtimes: Path, taken_port: int, kind: str
) -> None:
    server = make_server(**{f"{kind}_port": taken_port})
    with pytest.raises(ConfigError, match=f"^{kind} port {taken_port} of 127.0.0.1 .* in use"):
        server.start()
    assert list(runtimes.iterdir()) == []


def test_failed_load_tells_the_models_reason_and_leaves_nothing(
    make_server: MakeServer, broken_repository: Path, runtimes: Path, leftovers: Leftovers
) -> None:
    server = make_server(repository=broken_repository)
    server.start()
    name = only_runtime(runtimes)
    reason = "model 'broken' cannot be loaded: ValueError: checkpoint /nowhere has no config.json"
    with pytest.raises(LaunchError, match=reason):
        server.wait_ready(20.0)
    assert leftovers(name) == []
    assert list(runtimes.iterdir()) == []


def test_a_failed_load_is_told_while_another_model_still_loads(
    make_server: MakeServer, broken_repository: Path, slow_repository: Path, runtimes: Path
) -> None:
    server = make_server(repository=broken_repository, extra_repositories=(slow_repository,))
    server.start()
    with pytest.raises(LaunchError, match=r"^model 'broken' cannot be loaded: ValueError: chec"):
        server.wait_ready(60.0)
    assert list(runtimes.iterdir()) == []


def test_server_that_gave_up_a_starved_stub_is_started_once_more_on_the_same_ports(
    make_server: MakeServer,
    make_stalling_repository: Callable[[int], Path],
    runtimes: Path,
    leftovers: Leftovers,
) -> None:
    records: list[LogRecord] = []
    server = make_server(records.append, repository=make_stalling_repository(1))
    server.start()
    first, url = only_runtime(runtimes), server.http_url
    assert server.wait_ready(20.0, stall_s=1.0, notice_s=0.4)
    assert server.http_url == url
    assert leftovers(first) == []
    assert only_runtime(runtimes) != first
    (warning,) = (record.message for record in records if record.level == logging.WARNING)
    assert warning == (
        "Triton was not ready 1 s after its model was (a busy machine can do that); "
        "starting it once more"
    )
    waits = [record.message for record in records if record.message.startswith("still waiting")]
    assert any(wait.endswith("s: it is loading stalling") for wait in waits)
    assert any(
        wait.endswith("s: stalling is ready, but Triton has not taken notice") for wait in waits
    )


def test_second_stall_is_a_launch_error_that_says_what_to_do_and_leaves_nothing(
    make_server: MakeServer, make_stalling_repository: Callable[[int], Path], runtimes: Path
) -> None:
    server = make_server(repository=make_stalling_repository(2))
    server.start()
    with pytest.raises(LaunchError, match=r"1 s after its model was, twice; .* then start again$"):
        server.wait_ready(20.0, stall_s=1.0)
    assert list(runtimes.iterdir()) == []


def test_a_stub_killed_while_it_starts_is_a_launch_error(
    make_server: MakeServer, runtimes: Path, become: Become
) -> None:
    server = make_server()
    server.start()
    stubs: list[psutil.Process] = []

    def has_stub() -> bool:
        children = psutil.Process(server.pid).children()
        stubs.extend(child for child in children if child.name().startswith("triton_python"))
        return bool(stubs)

    assert become(has_stub)
    stubs[0].kill()
    # Triton says so itself if it asks the stub for a sign of life at that moment, else nothing.
    with pytest.raises(LaunchError, match=r"stub process \d+ ended by itself|is not healthy"):
        server.wait_ready(20.0)
    assert list(runtimes.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "the server ended with exit status 3"),
        (128 + signal.SIGSEGV, "the server was killed by SIGSEGV"),
        (-signal.SIGKILL, "the server's guardian was killed by SIGKILL"),
    ],
)
def test_an_exit_status_says_who_ended_and_how(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_mistaken_flag_is_named(make_server: MakeServer) -> None:
    server = make_server(flags=("--no-such-flag",))
    server.start()
    with pytest.raises(LaunchError, match="unrecognized option '--no-such-flag'"):
        server.wait_ready(20.0)


def test_stop_keeps_its_grace_period_while_a_client_holds_a_stream_open(
    make_server: MakeServer,
    runtimes: Path,
    leftovers: Leftovers,
    hold_stream: Callable[[str], None],
) -> None:
    server = make_server(grace_s=1.0)
    server.start()
    server.wait_ready(20.0)
    name = only_runtime(runtimes)
    hold_stream(server.grpc_url)
    started = time.monotonic()
    assert not server.stop(), "the server alone would hang for as long as the stream is open"
    assert time.monotonic() - started < 3.0
    assert leftovers(name) == []
    assert list(runtimes.iterdir()) == []


@pytest.mark.parametrize("victim", ["server", "guardian"])
def test_nothing_outlives_a_killed_process(
    make_server: MakeServer, runtimes: Path, leftovers: Leftovers, become: Become, victim: str
) -> None:
    server = make_server()
    server.start()
    server.wait_ready(20.0)
    name = only_runtime(runtimes)
    parent = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server.pid if victim == "server" else parent, signal.SIGKILL)
    assert become(lambda: server.poll() is not None)
    server.kill()
    assert leftovers(name) == []
    assert list(runtimes.iterdir()) == []


def test_explicit_model_control_loads_and_unloads(make_server: MakeServer, become: Become) -> None:
    server = make_server(flags=("--model-control-mode=explicit", "--load-model=echo"))
    server.start()
    server.wait_ready(20.0)
    assert echo(server, "a") == "a"
    post(f"{server.http_url}/v2/repository/models/echo/unload", {})

    def is_unloaded() -> bool:
        try:
            echo(server, "b")
        except urllib.error.HTTPError:
            return True
        return False

    assert become(is_unloaded)
    post(f"{server.http_url}/v2/repository/models/echo/load", {})
    assert echo(server, "c") == "c"
