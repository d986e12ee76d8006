"""What a watch finds wrong with a server, and what it forgives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from octavo.local.server_watch import ServerWatch

Become = Callable[[Callable[[], bool]], bool]
Watch = Callable[..., ServerWatch]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watches: list[ServerWatch] = []

    def start(probe: Callable[[], str | None], pid: int | None = None) -> ServerWatch:
        watches.append(ServerWatch(os.getpid() if pid is None else pid, probe, 0.01))
        return watches[-1]

    yield start
    for each in watches:
        each.stop()


def test_what_the_model_says_of_itself_is_a_fault_at_once(watch: Watch, become: Become) -> None:
    answers = iter([None, "the engine is gone"])
    found = watch(lambda: next(answers))
    assert become(lambda: found.fault is not None)
    assert found.fault == "the engine is gone"


def test_only_three_misses_in_a_row_are_a_fault(watch: Watch, become: Become) -> None:
    answers = iter([False, False, True, False, False, True, False, False, False, True])
    asked = []

    def probe() -> None:
        asked.append(0)
        if not next(answers):
            raise TimeoutError("no answer")

    found = watch(probe)
    assert become(lambda: found.fault is not None)
    assert (found.fault, len(asked)) == ("no answer", 9)


def test_a_stub_that_ended_is_a_fault(watch: Watch, become: Become) -> None:
    name = "triton_python_backend_stub"
    # A child of that name that its parent never collects, as Triton's would be.
    code = (
        "import ctypes, os, time\n"
        "if not os.fork():\n"
        f"    ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(["python3", "-c", code]) as server:
        found = watch(lambda: None, server.pid)
        assert become(lambda: found.fault is not None)
        assert str(found.fault).endswith(
            "ended by itself or was killed, and Triton does not replace it"
        )
        server.kill()
