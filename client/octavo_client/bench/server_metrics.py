"""What the server itself counted during a run, by its metrics. Knows nothing of requests."""

from __future__ import annotations

from octavo_client.metrics_change import change_between
from octavo_client.metrics_page import Sample

#: In the order in which they are told.
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "preemptions_total",
    "admission_rejections_total",
)


def counted_between(before: Sample, after: Sample, model: str) -> dict[str, int]:
    """Return how far each of `COUNTERS` went that a model has, over all versions and labels."""
    changes = [
        change_between(before.models[key], after.models[key], after.time_s - before.time_s)
        for key in before.models.keys() & after.models.keys()
        if key[0] == model
    ]
    return {
        name: round(sum(value for change in changes for value in change.of(name).values()))
        for name in COUNTERS
        if any(change.of(name) for change in changes)
    }
