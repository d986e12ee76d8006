"""Runtime directories are swept when nobody holds their lock, and only then."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.local.guardian import MARKER, SHARED_MEMORY, processes_of
from octavo.local.runtime import make_runtime, sweep_stale


def test_a_held_directory_is_left_alone(runtimes: Path) -> None:
    runtime, lock = make_runtime()
    sweep_stale()
    assert runtime.exists()
    os.close(lock)
    sweep_stale()
    assert list(runtimes.iterdir()) == []


def test_a_runtime_directory_is_for_its_owner_alone(runtimes: Path) -> None:
    runtime, lock = make_runtime()
    os.close(lock)
    assert runtime.stat().st_mode & 0o777 == 0o700
    sweep_stale()


def test_what_others_could_have_laid_out_is_not_swept(
    runtimes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("octavo-triton-", "elsewhere"):
        (runtimes / name).mkdir()
        (runtimes / name / "lock").touch()
    (runtimes / "octavo-triton-link").symlink_to(runtimes / "elsewhere")
    sweep_stale()
    assert sorted(path.name for path in runtimes.iterdir()) == [
        "elsewhere",
        "octavo-triton-",
        "octavo-triton-link",
    ]
    runtime, lock = make_runtime()
    os.close(lock)
    monkeypatch.setattr("os.getuid", lambda: runtime.stat().st_uid + 1)
    sweep_stale()
    assert runtime.exists()


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
