"""`octavo serve` starts a server that failed again: on its ports, with pauses, and not for ever."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.local.guardian import processes_of

pytestmark = pytest.mark.e2e

Serve = Callable[..., subprocess.Popen[str]]
Leftovers = Callable[[str], list[str]]
WaitForLine = Callable[[subprocess.Popen[str], str], str]
RuntimeName = Callable[[], str]

KILLED = "the server was killed by SIGKILL"


@pytest.fixture
def runtime_name(runtimes: Path) -> RuntimeName:
    """Return a function that names the only server that runs."""

    def find() -> str:
        (runtime,) = runtimes.iterdir()
        return runtime.name

    return find


@pytest.fixture
def wait_for_line() -> WaitForLine:
    """Return a function that reads a launcher's log up to a line that holds some words."""

    def wait(launcher: subprocess.Popen[str], words: str) -> str:
        assert launcher.stderr is not None
        lines: list[str] = []
        while words not in (line := launcher.stderr.readline()):
            lines.append(line)
            assert line, f"only these came: {lines}"
        return line

    return wait


def urls_of(launcher: subprocess.Popen[str]) -> dict[str, str]:
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("Octavo is ready after ")
    return dict(launcher.stdout.readline().split() for _ in range(3))


def only(name: str, command: str) -> int:
    (pid,) = (
        pid for pid in processes_of(name) if Path(f"/proc/{pid}/comm").read_text() == f"{command}\n"
    )
    return pid


@pytest.mark.parametrize("victim", ["tritonserver", "triton_python_b"])
def test_a_server_that_was_killed_or_lost_its_stub_is_started_again_on_its_ports(
    serve: Serve,
    runtime_name: RuntimeName,
    leftovers: Leftovers,
    wait_for_line: WaitForLine,
    hold_stream: Callable[[str], None],
    victim: str,
) -> None:
    launcher = serve()
    url, first = urls_of(launcher)["gRPC"], runtime_name()
    hold_stream(url)
    pid = only(first, victim)
    os.kill(pid, signal.SIGKILL)
    fault = {
        "tritonserver": KILLED,
        "triton_python_b": f"the model's stub process {pid} ended by itself or was killed, and "
        "Triton does not replace it",
    }[victim]
    line = wait_for_line(launcher, "the server was killed" if fault == KILLED else "stub process")
    assert line.split(" ", 1)[1] == f"ERROR   {fault}; the server is started again in 1 s\n"
    wait_for_line(launcher, "WARNING starting the server again (restart 1 of 5)")
    wait_for_line(launcher, "WARNING ready again after ")
    assert leftovers(first) == []
    assert runtime_name() != first
    hold_stream(url)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20.0) == 0


def test_restarts_are_bounded_and_the_end_says_so(
    serve: Serve, runtimes: Path, runtime_name: RuntimeName, wait_for_line: WaitForLine
) -> None:
    launcher = serve("--max-restarts", "1")
    urls_of(launcher)
    os.kill(only(runtime_name(), "tritonserver"), signal.SIGKILL)
    wait_for_line(launcher, "ready again after ")
    os.kill(only(runtime_name(), "tritonserver"), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=10.0)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1] == (
        f"Error: {KILLED}; gave up after 1 restart, nothing of it is left running"
    )
    assert list(runtimes.iterdir()) == []


def test_without_restarts_the_first_failure_ends_the_launcher(
    serve: Serve, runtimes: Path, runtime_name: RuntimeName
) -> None:
    launcher = serve("--max-restarts", "0")
    urls_of(launcher)
    os.kill(only(runtime_name(), "tritonserver"), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=10.0)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1] == f"Error: {KILLED}; nothing of it is left running"
    assert list(runtimes.iterdir()) == []


def test_a_start_that_fails_counts_and_its_reason_is_told(
    serve: Serve,
    runtime_name: RuntimeName,
    echo_repository: Path,
    tmp_path: Path,
    wait_for_line: WaitForLine,
) -> None:
    repository = Path(shutil.copytree(echo_repository, tmp_path / "repository"))
    launcher = serve("--max-restarts", "2", repository=repository)
    urls_of(launcher)
    (repository / "echo" / "1" / "model.py").write_text("raise ValueError('the disk is gone')\n")
    os.kill(only(runtime_name(), "tritonserver"), signal.SIGKILL)
    wait_for_line(launcher, "(restart 1 of 2)")
    wait_for_line(launcher, "the disk is gone; the server is started again in 2 s")
    _, errors = launcher.communicate(timeout=20.0)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1].endswith(
        "the disk is gone; gave up after 2 restarts in a row, nothing of it is left running"
    )


def test_a_signal_during_the_pause_stops_at_once(
    serve: Serve, runtimes: Path, runtime_name: RuntimeName, wait_for_line: WaitForLine
) -> None:
    launcher = serve()
    urls_of(launcher)
    os.kill(only(runtime_name(), "tritonserver"), signal.SIGKILL)
    wait_for_line(launcher, "started again in 1 s")
    sent = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=10.0)
    assert time.monotonic() - sent < 0.9, "it did not wait for the pause to end"
    assert (launcher.returncode, errors.splitlines()[-1]) == (0, "stopped")
    assert list(runtimes.iterdir()) == []
