"""The choice of launch configurations from measured times, and the table to paste.

Pure: what a configuration costs comes from a function that is passed in. Knows neither torch nor a
kernel; tuned_tables knows what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Config = Any
"""A frozen dataclass of `_launch.py` or of a sibling."""
Measure = Callable[[Config], Sequence[float] | None]
"""Seconds of each workload, or None for what cannot be launched or spills."""

LEAST_GAIN = 1.03
"""A configuration is replaced only by one that is this much faster: less is noise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of a table, and what it may become.

    All workloads of an entry run by one configuration, decode and prefill alike, for a row's bits
    depend on it: it is never chosen apart for each.
    """

    label: str
    current: Config
    values: Mapping[str, tuple[Any, ...]]
    """What each field that may change may be."""
    is_valid: Callable[[Config], bool] = field(default=lambda config: True)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured of an entry."""

    entry: Entry
    best: Config
    gain: float
    """Times as fast as the current one, over all workloads; 1 where that one stays."""
    num_measured: int


def candidates(entry: Entry, config: Config) -> Iterator[Config]:
    """Yield the valid configurations that differ from this one in a single field."""
    for name, values in entry.values.items():
        for value in values:
            if value != getattr(config, name):
                candidate = replace(config, **{name: value})
                if entry.is_valid(candidate):
                    yield candidate


def choose(entry: Entry, measure: Measure) -> Choice:
    """Go from the current configuration to the fastest that differs in one field, and on.

    Raises:
        ValueError: The current configuration cannot be measured.
    """
    first_s = measure(entry.current)
    if first_s is None:
        raise ValueError(f"{entry.label}: {entry.current} cannot be launched on this device")
    gains: dict[Config, float] = {entry.current: 1.0}
    best = entry.current
    while True:
        for candidate in candidates(entry, best):
            if candidate not in gains:
                gains[candidate] = _gain(first_s, measure(candidate))
        fastest = max(gains, key=gains.__getitem__)
        if gains[fastest] < gains[best] * LEAST_GAIN:
            return Choice(entry, best, gains[best], len(gains))
        best = fastest


def _gain(first_s: Sequence[float], times_s: Sequence[float] | None) -> float:
    """Return how many times as fast: the geometric mean, in which no workload outweighs another."""
    if times_s is None:
        return 0.0
    logs = [math.log(a / b) for a, b in zip(first_s, times_s, strict=True)]
    return math.exp(sum(logs) / len(logs))


def table_text(name: str, architecture: int | str, choices: Sequence[Choice], where: str) -> str:
    """Return one table's entries as Python to paste, under a comment that says how they came."""
    lines = [f"# {name}, measured on {where}."]
    lines.append(f"{architecture!r}: (")
    for choice in choices:
        verdict = "as before" if choice.best == choice.entry.current else f"x{choice.gain:.2f}"
        lines.append(f"    # {choice.entry.label}: {verdict}, of {choice.num_measured} measured")
        lines.append(f"    {choice.best!r},")
    return "\n".join([*lines, "),"])
