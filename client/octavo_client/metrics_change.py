"""What happened between two looks at a model: counts, rates and quantiles.

Every function is pure. Knows nothing of where samples come from or how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from octavo_client.metrics_page import Histogram, ModelSample, Series


@dataclass(frozen=True, slots=True)
class Change:
    """By how much the counters and histograms of a model have grown, and in what time."""

    seconds: float
    counters: Mapping[Series, float]
    histograms: Mapping[str, Histogram]

    def of(self, name: str) -> dict[str, float]:
        """Return the growth of the counters of this name by the label of their own."""
        return values_of(self.counters, name)

    def rate(self, name: str) -> float | None:
        """Return the growth a second of the counters of this name; None if there are none."""
        found = self.of(name)
        return sum(found.values()) / self.seconds if found else None


def values_of(counters: Mapping[Series, float], name: str) -> dict[str, float]:
    """Return the counters of this name by the label of their own."""
    return {label: value for (of, label), value in counters.items() if of == name}


def change_between(before: ModelSample, after: ModelSample, seconds: float) -> Change:
    """Compare two looks; what is less than before has begun anew from 0 in between."""
    counters = {
        series: increase(before.counters.get(series, 0.0), value)
        for series, value in after.counters.items()
    }
    histograms = {
        name: _growth(before.histograms.get(name), histogram)
        for name, histogram in after.histograms.items()
    }
    return Change(seconds, counters, histograms)


def increase(before: float, after: float) -> float:
    """Return by how much a counter has grown that may have begun anew from 0."""
    return after - before if after >= before else after


def total(changes: Iterable[Change]) -> Change:
    """Add up changes that follow each other; of none, nothing happened in no time."""
    seconds = 0.0
    counters: dict[Series, float] = {}
    histograms: dict[str, Histogram] = {}
    for change in changes:
        seconds += change.seconds
        for series, value in change.counters.items():
            counters[series] = counters.get(series, 0.0) + value
        for name, histogram in change.histograms.items():
            histograms[name] = _sum(histograms.get(name), histogram)
    return Change(seconds, counters, histograms)


def quantile(histogram: Histogram, share: float) -> float | None:
    """Return the value that `share` of all values, from 0 to 1, do not exceed; None of no values.

    Values are taken to lie evenly between the bounds around them, the first of which is 0. What
    lies above the last finite bound counts as that bound.
    """
    rank = share * histogram.counts[-1]
    if not histogram.counts[-1]:
        return None
    edges = pairwise(((0.0, 0.0), *zip(histogram.bounds, histogram.counts, strict=True)))
    for (low, below), (high, up_to) in edges:
        if rank <= up_to and up_to > below and high != float("inf"):
            return low + (high - low) * (rank - below) / (up_to - below)
    return last_bound(histogram)


def last_bound(histogram: Histogram) -> float:
    """Return the greatest finite bound, or 0 if there is none."""
    return histogram.bounds[-2] if len(histogram.bounds) > 1 else 0.0


def _growth(before: Histogram | None, after: Histogram) -> Histogram:
    if before is None or before.bounds != after.bounds or before.counts[-1] > after.counts[-1]:
        return after
    grown = (b - a for a, b in zip(before.counts, after.counts, strict=True))
    return Histogram(after.bounds, tuple(grown))


def _sum(first: Histogram | None, second: Histogram) -> Histogram:
    if first is None or first.bounds != second.bounds:
        return second
    added = (a + b for a, b in zip(first.counts, second.counts, strict=True))
    return Histogram(second.bounds, tuple(added))
