"""What a side is: an engine that can be installed, started, asked, weighed and stopped.

Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.loads import Load
from benchmarks.workload import Job

DEMO_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Layers, keys and values, heads, their size, bytes of a bfloat16."""


class Unavailable(Exception):
    """A side cannot be installed, started or asked; the text says why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What every side is given."""

    cores: tuple[int, ...]
    """Numbers of the cores that it may use, one computing thread on each."""
    kv_bytes: int
    """Memory for keys and values."""

    @property
    def threads(self) -> int:
        """Return how many threads compute."""
        return len(self.cores)

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens of the demo model have room for keys and values in bfloat16."""
        return self.kv_bytes // DEMO_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Reply:
    """When one request was sent and when each of its tokens came, in seconds from the start."""

    sent_s: float
    token_s: tuple[float, ...]


class Side(Protocol):
    """One engine; `start`, any number of `play`, `stop`, each in this process's main thread."""

    name: str
    """As on the command line."""
    title: str
    """As in tables."""
    transport: str
    """How requests reach it."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Return what was chosen for it, beside its defaults; for the report."""
        ...

    def install(self) -> Mapping[str, str]:
        """Make its environment and its form of the model, once; return versions.

        Raises:
            Unavailable: a package, a compiler or the conversion failed.
        """
        ...

    def start(self) -> None:
        """Start its processes and wait until it can be asked.

        Raises:
            Unavailable: it ended, or was not ready in time.
        """
        ...

    def play(self, load: Load) -> list[Reply]:
        """Send all requests of a load; return a reply for each, in their order.

        Raises:
            Unavailable: a request failed.
        """
        ...

    @property
    def process_id(self) -> int:
        """Return the root of its process tree."""
        ...

    def pause(self) -> None:
        """Take no CPU until `resume`."""
        ...

    def resume(self) -> None:
        """Be ready to play again."""
        ...

    def stop(self) -> None:
        """End its processes; harmless when they have ended or never were."""
        ...


def play_with_threads(load: Load, ask: Callable[[Job], Iterator[int]]) -> list[Reply]:
    """Send each request from a thread of its own; `ask` yields how many tokens came at once."""

    def reply(job: Job, arrival_s: float) -> Reply:
        time.sleep(max(0.0, started_s + arrival_s - time.monotonic()))
        sent_s = time.monotonic() - started_s
        token_s: list[float] = []
        for count in ask(job):
            token_s += [time.monotonic() - started_s] * count
        return Reply(sent_s, tuple(token_s))

    with ThreadPoolExecutor(load.concurrency) as threads:
        started_s = time.monotonic()
        return list(threads.map(reply, load.jobs, load.arrivals_s))
