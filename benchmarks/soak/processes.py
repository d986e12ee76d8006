"""What the server's processes hold: memory, threads, files, shared memory.

Knows the processes by their commands and nothing of what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from octavo.local.guardian import MARKER, SHARED_MEMORY
from octavo.local.triton_server import TritonServer

_COMMANDS = {"engine": "octavo.engine_process", "stub": "triton_python_backend_stub"}
SAMPLE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds at one time of the monotonic clock."""

    at_s: float
    role: str
    pid: int
    rss_bytes: int
    num_threads: int
    num_files: int


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a process came to hold more."""

    memory_share: float
    num_threads: int
    num_files: int


def find_processes(server: TritonServer) -> dict[str, psutil.Process]:
    """Return those that live, by role; between two lives of an engine there is none."""
    root = psutil.Process(server.pid)
    found = {"server": root}
    for child in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            found |= {role: child for role, word in _COMMANDS.items() if word in command}
    return found


def count_engines(server: TritonServer) -> int:
    """Return how many engine processes live."""
    count = 0
    for child in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            count += _COMMANDS["engine"] in " ".join(child.cmdline())
    return count


def look(server: TritonServer) -> list[Held]:
    """Return what each process holds now."""
    held = []
    for role, process in find_processes(server).items():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            now_s, rss_bytes = time.monotonic(), process.memory_info().rss
            counts = process.num_threads(), process.num_fds()
            held.append(Held(now_s, role, process.pid, rss_bytes, *counts))
    return held


async def sample(server: TritonServer, samples: list[Held]) -> None:
    """Look again and again until cancelled."""
    while True:
        samples += await asyncio.to_thread(look, server)
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def shared_memory(server: TritonServer) -> tuple[int, int]:
    """Return how many files of shared memory the server has, and their bytes."""
    name = psutil.Process(server.pid).environ()[MARKER]
    sizes = [path.stat().st_size for path in SHARED_MEMORY.glob(f"{name}*")]
    return len(sizes), sum(sizes)


def growth(samples: Sequence[Held], role: str, warm_up_s: float) -> Growth | None:
    """Return the most that a process of the role grew by once it was warm.

    Compares the first and the last fifth of each life; None if none was long enough.
    """
    grown = []
    for pid in {held.pid for held in samples if held.role == role}:
        life = [held for held in samples if held.pid == pid]
        warm = [held for held in life if held.at_s >= life[0].at_s + warm_up_s]
        fifth = len(warm) // 5
        if fifth:
            grown.append(_growth(warm[:fifth], warm[-fifth:]))
    if not grown:
        return None
    return Growth(
        max(each.memory_share for each in grown),
        max(each.num_threads for each in grown),
        max(each.num_files for each in grown),
    )


def _growth(first: Sequence[Held], last: Sequence[Held]) -> Growth:
    def typical(held: Sequence[Held], name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in held))

    return Growth(
        typical(last, "rss_bytes") / typical(first, "rss_bytes") - 1.0,
        int(typical(last, "num_threads") - typical(first, "num_threads")),
        int(typical(last, "num_files") - typical(first, "num_files")),
    )
