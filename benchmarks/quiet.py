"""Whether a measurement had the machine to itself.

Noise is severe on shared machines: a run counts only when processes that do not belong to it took
under 5 % of the CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

import psutil

MOST_FOREIGN_SHARE = 0.05
MOST_ATTEMPTS = 3

T = TypeVar("T")


class QuietWatch:
    """Measure wall time, and the CPU share of processes outside the given process trees.

    Use as a context manager around the work; `roots` are process ids beside this one's own tree.
    """

    def __init__(self, roots: Iterable[int] = ()) -> None:
        self._roots = (os.getpid(), *roots)
        self.wall_s = 0.0
        self.foreign_share = 0.0

    @property
    def is_valid(self) -> bool:
        """Whether the work had the machine to itself."""
        return self.foreign_share <= MOST_FOREIGN_SHARE

    def __enter__(self) -> Self:
        self._start = (time.monotonic(), _busy_s(), self._own_s())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wall, busy, own = self._start
        self.wall_s = time.monotonic() - wall
        foreign_s = (_busy_s() - busy) - (self._own_s() - own)
        self.foreign_share = max(0.0, foreign_s / (self.wall_s * (os.cpu_count() or 1)))

    def _own_s(self) -> float:
        total = 0.0
        seen: set[int] = set()
        for root in self._roots:
            for process in _tree(root):
                if process.pid not in seen:
                    seen.add(process.pid)
                    times = process.cpu_times()
                    # Children that have ended count too.
                    total += times.user + times.system
                    total += times.children_user + times.children_system
        return total


def quietly(work: Callable[[], T]) -> tuple[T, QuietWatch]:
    """Do the work until it had the machine to itself, at most `MOST_ATTEMPTS` times.

    Returns the last result, and the watch that says whether it counts.
    """
    for _ in range(MOST_ATTEMPTS):
        with QuietWatch() as watch:
            result = work()
        if watch.is_valid:
            break
    return result, watch


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
