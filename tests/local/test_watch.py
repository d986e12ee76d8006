"""`octavo watch` as a container runs it: it ends with its server, and ends one that cannot heal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from octavo.local import bundle
from octavo.local.guardian import MARKER, STACK_BYTES, processes_of
from octavo.local.ports import claim_ports
from octavo.local.server_command import server_command
from octavo.local.server_options import ServerOptions

pytestmark = pytest.mark.e2e

OCTAVO = Path(sys.executable).parent / "octavo"
Become = Callable[[Callable[[], bool]], bool]
Leftovers = Callable[[str], list[str]]
NAME = f"octavo-watched-{os.getpid()}"


@pytest.fixture
def watched(
    echo_repository: Path, tmp_path: Path, become: Become
) -> Iterator[subprocess.Popen[str]]:
    """Return `octavo watch` with a bare `tritonserver` that is ready."""
    runtime = tmp_path / NAME
    bundle.write_backends(runtime / "backends")
    ports = claim_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
    command = server_command(ServerOptions(repository=echo_repository), ports, runtime)
    with subprocess.Popen(
        [OCTAVO, "watch", "--url", f"127.0.0.1:{ports['grpc']}", "--", *command],
        env={**bundle.server_environment(os.environ), MARKER: NAME},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert become(lambda: is_ready(ports["http"]))
            yield process
        finally:
            process.kill()
            # The model's own child, which ends with a container.
            for pid in processes_of(NAME):
                os.kill(pid, signal.SIGKILL)


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5.0).close()
        return True
    return False


def pid_of(command: str) -> int:
    (pid,) = (pid for pid in processes_of(NAME) if command_of(pid) == command)
    return pid


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def what_is_left(leftovers: Leftovers) -> list[str]:
    """Return what is left of the server beside its model's own child."""
    children = [f"process {pid}" for pid in processes_of(NAME) if command_of(pid) == "sleep"]
    return [each for each in leftovers(NAME) if each not in children]


def test_a_lost_stub_ends_server_and_watch_with_status_1(
    watched: subprocess.Popen[str], leftovers: Leftovers
) -> None:
    stub = pid_of("triton_python_b")
    os.kill(stub, signal.SIGKILL)
    assert watched.wait(timeout=30.0) == 1
    assert watched.stderr is not None
    # The model's own child keeps the other end open.
    line = next(line for line in watched.stderr if "octavo watch" in line)
    assert line == (
        f"octavo watch: the model's stub process {stub} ended by itself or was killed, and Triton "
        "does not replace it; the server is ended\n"
    )
    assert what_is_left(leftovers) == []


def test_a_watched_servers_threads_have_stacks_that_hold_large_bodies(
    watched: subprocess.Popen[str],
) -> None:
    limit, _ = psutil.Process(pid_of("tritonserver")).rlimit(psutil.RLIMIT_STACK)
    assert limit == STACK_BYTES
    watched.terminate()
    assert watched.wait(timeout=30.0) == 0


@pytest.mark.parametrize(
    ("victim", "number", "status"),
    [("octavo", signal.SIGTERM, 0), ("tritonserver", signal.SIGKILL, 137)],
)
def test_watch_passes_signals_on_and_ends_with_its_servers_status(
    watched: subprocess.Popen[str],
    leftovers: Leftovers,
    victim: str,
    number: signal.Signals,
    status: int,
) -> None:
    os.kill(watched.pid if victim == "octavo" else pid_of(victim), number)
    assert watched.wait(timeout=30.0) == status
    assert what_is_left(leftovers) == []
