"""Runtime directories are swept when nobody holds their lock, and only then."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from octavo.local.guardian import MARKER, SHARED_MEMORY, processes_of
from octavo.local.runtime import make_runtime, sweep_stale


def test_a_held_directory_is_left_alone(runtimes: Path) -> None:
    runtime, lock = make_runtime()
    sweep_stale()
    assert runtime.exists()
    os.close(lock)
    sweep_stale()
    assert list(runtimes.iterdir()) == []


def test_sweep_ends_processes_and_removes_shared_memory_of_that_directory_alone(
    runtimes: Path, leftovers: Callable[[str], list[str]]
) -> None:
    (dead, dead_lock), (alive, alive_lock) = make_runtime(), make_runtime()
    sleepers = []
    for runtime in (dead, alive):
        (SHARED_MEMORY / f"{runtime.name}-region").touch()
        marked = {**os.environ, MARKER: runtime.name}
        sleepers.append(subprocess.Popen(["sleep", "60"], env=marked, start_new_session=True))
    os.close(dead_lock)
    sweep_stale()
    assert leftovers(dead.name) == []
    assert processes_of(alive.name) == [sleepers[1].pid]
    assert list(runtimes.iterdir()) == [alive]
    os.close(alive_lock)
    sweep_stale()
    assert leftovers(alive.name) == []
    assert [sleeper.wait() for sleeper in sleepers] == [-9, -9]
