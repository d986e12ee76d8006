"""`octavo serve` as a user runs it: one foreground process, signals, and hard kills."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.local.guardian import processes_of
from octavo.local.triton_server import TritonServer

pytestmark = pytest.mark.e2e

Serve = Callable[..., subprocess.Popen[str]]
Leftovers = Callable[[str], list[str]]
Become = Callable[[Callable[[], bool]], bool]


def wait_for_greeting(launcher: subprocess.Popen[str], runtimes: Path) -> str:
    """Read standard output up to the endpoints; return the name of the server's runtime."""
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("Octavo is ready after ")
    (runtime,) = runtimes.iterdir()
    return runtime.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_everything_with_status_0(
    serve: Serve, runtimes: Path, leftovers: Leftovers, number: signal.Signals
) -> None:
    launcher = serve()
    name = wait_for_greeting(launcher, runtimes)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=10.0)
    assert launcher.returncode == 0
    assert errors.splitlines()[-1] == "stopped"
    assert leftovers(name) == []
    assert list(runtimes.iterdir()) == []


def test_a_second_signal_ends_the_grace_period(
    serve: Serve, runtimes: Path, leftovers: Leftovers
) -> None:
    launcher = serve("--grace", "60")
    name = wait_for_greeting(launcher, runtimes)
    started = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=10.0)
    assert launcher.returncode == 0
    assert errors.splitlines()[-1] == "stopped at once, as asked"
    assert time.monotonic() - started < 2.0, "a clean end takes Triton about three seconds"
    assert leftovers(name) == []


def test_a_signal_during_start_is_obeyed(serve: Serve, runtimes: Path, become: Become) -> None:
    launcher = serve()
    assert become(lambda: any(runtimes.iterdir()))
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=10.0)
    assert (launcher.returncode, output) == (0, "")
    assert list(runtimes.iterdir()) == []


def test_a_client_that_holds_a_stream_open_is_not_blamed_and_tritons_own_error_is_not_shown(
    serve: Serve, runtimes: Path, hold_stream: Callable[[str], None]
) -> None:
    launcher = serve("--grace", "1")
    wait_for_greeting(launcher, runtimes)
    assert launcher.stdout is not None
    urls = dict(launcher.stdout.readline().split() for _ in range(3))
    hold_stream(urls["gRPC"])
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=10.0)
    assert launcher.returncode == 0
    assert errors.splitlines()[-2:] == [
        "stopping; a second Ctrl-C ends everything at once",
        "stopped; Triton did not leave in time and was ended",
    ]


def test_greeting_says_that_other_machines_can_reach_the_server(
    serve: Serve, runtimes: Path
) -> None:
    launcher = serve("--host", "0.0.0.0")
    wait_for_greeting(launcher, runtimes)
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline() for _ in range(4)]
    assert lines[-1] == "  listens on 0.0.0.0: other machines can reach it\n"


def test_a_server_that_has_loaded_nothing_says_what_it_could_load(
    serve: Serve, runtimes: Path
) -> None:
    launcher = serve("--", "--model-control-mode=explicit")
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline().rstrip() for _ in range(7)]
    assert lines[0].endswith(" s, and no model is loaded (Ctrl-C stops it)")
    assert lines[4:6] == ["", "  not loaded: echo"]
    url = lines[6].removeprefix("  curl -X POST ")
    with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=60.0) as answer:
        assert answer.status == 200


def test_a_log_that_nobody_reads_holds_up_nothing(
    serve: Serve, runtimes: Path, leftovers: Leftovers
) -> None:
    launcher = serve("--verbose")
    assert launcher.stderr is not None
    fcntl.fcntl(launcher.stderr, fcntl.F_SETPIPE_SZ, 4096)
    name = wait_for_greeting(launcher, runtimes)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20.0) == 0
    assert leftovers(name) == []


def test_output_that_cannot_be_written_does_not_end_the_server(
    serve: Serve, runtimes: Path, become: Become
) -> None:
    launcher = serve()
    assert launcher.stderr is not None
    launcher.stderr.close()
    name = wait_for_greeting(launcher, runtimes)
    os.kill(server_of(name), signal.SIGKILL)
    assert become(lambda: name not in [folder.name for folder in runtimes.iterdir()])
    assert become(lambda: any(runtimes.iterdir()))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20.0) == 0


def test_a_failed_load_ends_with_status_1_and_the_reason(
    serve: Serve, runtimes: Path, broken_repository: Path
) -> None:
    launcher = serve(repository=broken_repository)
    output, errors = launcher.communicate(timeout=20.0)
    assert (launcher.returncode, output) == (1, "")
    assert errors.splitlines()[-1].endswith(
        "model 'broken' cannot be loaded: ValueError: checkpoint /nowhere has no config.json"
    )
    assert list(runtimes.iterdir()) == []


def test_nothing_outlives_a_killed_launcher(
    serve: Serve, runtimes: Path, leftovers: Leftovers, become: Become
) -> None:
    launcher = serve()
    name = wait_for_greeting(launcher, runtimes)
    launcher.kill()
    assert become(lambda: not leftovers(name) and not any(runtimes.iterdir()))


def test_the_next_start_sweeps_what_a_killed_launcher_and_guardian_left(
    serve: Serve,
    make_server: Callable[..., TritonServer],
    runtimes: Path,
    leftovers: Leftovers,
) -> None:
    launcher = serve()
    name = wait_for_greeting(launcher, runtimes)
    guardian = parent_of(server_of(name))
    os.kill(launcher.pid, signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    assert leftovers(name) != []
    make_server().start()
    assert leftovers(name) == []
    assert not (runtimes / name).exists()


def server_of(name: str) -> int:
    """Return the process id of `tritonserver` itself."""
    (pid,) = (pid for pid in processes_of(name) if command_of(pid) == "tritonserver")
    return pid


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
