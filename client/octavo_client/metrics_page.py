"""What a metrics endpoint says of Octavo's models at one moment, as it stands there.

Knows Prometheus' text and the prefix of the names. Knows nothing of rates, of drawing or of
connections, nor which metrics there are: a model that does not have one is just without it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Line

PREFIX = "octavo_"
#: From here on a float skips whole numbers; no figure of a server comes near.
MAX_VALUE = 2.0**53

Key = tuple[str, str]
"""A model's name and version."""

Series = tuple[str, str]
"""A metric's name without the prefix, and the value of the label of its own; empty without one."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many of the values lie at or below each bound."""

    bounds: tuple[float, ...]
    """Ascending; the last is infinite."""
    counts: tuple[float, ...]
    """One for each bound, each with all below it; so the last is the number of values."""


@dataclass(frozen=True, slots=True)
class ModelSample:
    """What is told of one version of a model."""

    key: Key
    gauges: Mapping[str, float]
    counters: Mapping[Series, float]
    histograms: Mapping[str, Histogram]


@dataclass(frozen=True, slots=True)
class Sample:
    """All models at one moment; its time is of a clock of which only differences count."""

    time_s: float
    models: Mapping[Key, ModelSample]


def parse(text: str, time_s: float) -> Sample:
    """Read the text of a metrics endpoint; what is not Octavo's is passed over.

    Raises:
        ValueError: it is not in Prometheus' text format, or what it says cannot be.
    """
    gauges: dict[Key, dict[str, float]] = defaultdict(dict)
    counters: dict[Key, dict[Series, float]] = defaultdict(dict)
    buckets: dict[Key, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for family in text_string_to_metric_families(text):
        for line in family.samples:
            if not line.name.startswith(PREFIX):
                continue
            if not 0.0 <= line.value <= MAX_VALUE:
                raise ValueError(f"{line.name} has the value {line.value:g}")
            key = line.labels.get("model", ""), line.labels.get("version", "")
            name = line.name.removeprefix(PREFIX)
            if family.type == "counter":
                counters[key][name, _own_label(line)] = line.value
            elif family.type == "histogram" and name.endswith("_bucket"):
                bound = float(line.labels.get("le", ""))
                buckets[key][name.removesuffix("_bucket")][bound] = line.value
            elif family.type == "gauge":
                gauges[key][name] = line.value
    keys = sorted({*gauges, *counters, *buckets})
    histograms = {key: {name: _histogram(of) for name, of in buckets[key].items()} for key in keys}
    models = {key: ModelSample(key, gauges[key], counters[key], histograms[key]) for key in keys}
    return Sample(time_s, models)


def _own_label(line: Line) -> str:
    own = (value for name, value in line.labels.items() if name not in ("model", "version"))
    return next(own, "")


def _histogram(counts: Mapping[float, float]) -> Histogram:
    bounds = tuple(sorted(counts))
    if bounds[-1] != math.inf:
        raise ValueError(f"a histogram ends with the bound {bounds[-1]:g} instead of +Inf")
    return Histogram(bounds, tuple(counts[bound] for bound in bounds))
