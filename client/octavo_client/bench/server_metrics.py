"""What the server itself counted during a run, by its metrics. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping

from octavo_client.top_sample import Sample

#: In the order in which they are told.
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "preemptions_total",
    "admission_rejections_total",
)

Counts = Mapping[str, int]


def count(sample: Sample, model: str) -> dict[str, int]:
    """Return those of `COUNTERS` that a model has, over all its versions and labels."""
    totals: dict[str, float] = {}
    for (name, _), figures in sample.models.items():
        if name == model:
            for (counter, _), value in figures.counters.items():
                totals[counter] = totals.get(counter, 0.0) + value
    return {name: round(totals[name]) for name in COUNTERS if name in totals}


def counted_between(before: Counts, after: Counts) -> dict[str, int]:
    """Return how far each counter went; one that began anew has gone as far as it says.

    A server that told nothing before has nothing to compare with.
    """
    if not before:
        return {}
    return {
        name: value - before.get(name, 0) if value >= before.get(name, 0) else value
        for name, value in after.items()
    }
