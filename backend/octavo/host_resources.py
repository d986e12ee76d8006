"""How much memory and processor time this process may use: what the machine has, or its container.

A container sees the memory and the cores of the whole machine. What it may use of them stands in
files of its control group, cgroup v2 or v1, and a group is also bound by the limits of all groups
above it. Knows nothing of what the resources are used for, nor of GPUs.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

THIS_MACHINE = "this machine"
_ROOT = Path("/")
_CONTROLLERS = {"memory", "cpu"}
#: Names of cgroup v2, then of v1: the limit, what is used, and how lines about caches begin.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
#: Names of cgroup v2, then of v1, whose numbers are a quota and its period.
_CPU_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))

logger = logging.getLogger(__name__)

ReadText = Callable[[PurePosixPath], str]
"""Returns what a file holds, and an empty string if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount, and in words who has no more of it."""

    amount: int
    source: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory in bytes; what is free may be bound by another group than the whole."""

    total: Limit
    free: Limit
    """What could be taken now: what the kernel holds only to cache files counts as free."""


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return the memory of this machine, or what a control group leaves of it."""
    memory = psutil.virtual_memory()
    known = [HostMemory(Limit(memory.total, THIS_MACHINE), Limit(memory.available, THIS_MACHINE))]
    known += memory_limits(_reader(root))
    total = min((each.total for each in known), key=_amount)
    free = min((each.free for each in known), key=_amount)
    if free.source != THIS_MACHINE:
        logger.info("%s has %.0f MiB of free memory", free.source, free.amount / 2**20)
    return HostMemory(total, free)


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many threads can compute at once: a core for each, and time of a quota."""
    allowed = len(os.sched_getaffinity(0))
    return within_quota(min(allowed, psutil.cpu_count(logical=False) or allowed), root)


def within_quota(num_cpus: int, root: Path = _ROOT) -> int:
    """Return how many of `num_cpus` processors a quota allows to be kept busy; at least 1."""
    quota = min(cpu_quotas(_reader(root)), key=_amount, default=None)
    if quota is None or quota.amount >= num_cpus:
        return num_cpus
    logger.info("%s has time of %d CPUs, %d could be used", quota.source, quota.amount, num_cpus)
    return quota.amount


def memory_limits(read: ReadText) -> Iterator[HostMemory]:
    """Yield the memory of every control group over this process that has a limit."""
    for folder, names in itertools.product(group_folders(read), _MEMORY_FILES):
        limit_name, usage_name, prefix = names
        total, used = _numbers(read(folder / limit_name)), _numbers(read(folder / usage_name))
        if total and used:
            line = rf"^{prefix}(?:in)?active_file (\d+)$"
            caches = re.findall(line, read(folder / "memory.stat"), re.MULTILINE)
            free = max(0, total[0] - max(0, used[0] - sum(map(int, caches))))
            source = _name(folder / limit_name)
            yield HostMemory(Limit(total[0], source), Limit(free, source))


def cpu_quotas(read: ReadText) -> Iterator[Limit]:
    """Yield the quota of every control group over this process that has one, in whole CPUs."""
    for folder, names in itertools.product(group_folders(read), _CPU_FILES):
        numbers = _numbers(" ".join(read(folder / name) for name in names))
        if len(numbers) == 2:
            quota_us, period_us = numbers
            yield Limit(max(1, quota_us // period_us), _name(folder / names[0]))


def group_folders(read: ReadText) -> Iterator[PurePosixPath]:
    """Yield the folders of this process's control groups, each before those above it."""
    paths: dict[str, str] = {}
    for line in read(PurePosixPath("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in read(PurePosixPath("/proc/self/mountinfo")).splitlines():
        mount, _, system = line.partition(" - ")
        kind, *_, options = system.split()
        # That of cgroup v2 has no name in the list of groups.
        names = {"cgroup2": {""}, "cgroup": _CONTROLLERS & {*options.split(",")}}.get(kind, ())
        for name in sorted(names & paths.keys()):
            top, point = map(PurePosixPath, mount.split()[3:5])
            yield from _upwards(point, top, PurePosixPath(paths[name]))


def _upwards(
    point: PurePosixPath, top: PurePosixPath, group: PurePosixPath
) -> Iterator[PurePosixPath]:
    """Yield the folders of `group` and those above it, where `point` shows the group `top`."""
    # A container may be shown its own group alone, at a path that only the machine knows.
    is_below = group.is_relative_to(top) and ".." not in group.parts
    parts = group.relative_to(top).parts if is_below else ()
    for length in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:length])


def _name(file: PurePosixPath) -> str:
    return f"this control group ({file})"


def _amount(limit: Limit) -> int:
    return limit.amount


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that make up a text; none if a word is `max` or -1, for no limit."""
    words = text.split()
    return tuple(map(int, words)) if all(map(str.isdecimal, words)) else ()


def _reader(root: Path) -> ReadText:
    def read(path: PurePosixPath) -> str:
        try:
            return (root / path.relative_to("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    return read
