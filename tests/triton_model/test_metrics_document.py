"""docs/metrics.md lists every metric as it is made."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from octavo.triton_model.metrics import EngineMetrics

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_documented_metrics_are_the_metrics() -> None:
    families: dict[str, tuple[str, str]] = {}
    labels: dict[str, dict[str, list[str]]] = {}
    bounds: dict[str, str] = {}

    class Family:
        GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

        def __init__(self, name: str, description: str, kind: str) -> None:
            self.name = name
            families[name] = (kind, description)
            self.labels = labels.setdefault(name, {})

        def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> object:
            if buckets:
                bounds[self.name] = ", ".join(f"{bound:g}" for bound in buckets)
            for label, value in labels.items():
                if label not in ("model", "version"):
                    self.labels.setdefault(label, []).append(f"`{value}`")
            return object()

    EngineMetrics(cast(Any, SimpleNamespace(MetricFamily=Family)), "octavo", "1")
    made = [
        (
            f"`{name}`",
            kind,
            "; ".join(f"`{label}`: {', '.join(each)}" for label, each in labels[name].items()),
            meaning,
        )
        for name, (kind, meaning) in families.items()
    ]
    rows = re.findall(r"^\| (`\w+`) \| (\w+) \|(.*?)\| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert [(name, kind, own.strip(), text) for name, kind, own, text in rows] == made
    documented = {
        name: row
        for names, row in re.findall(
            r"^\| (`octavo_\w+`.*) \| ([\d., ]+) \|$", DOCUMENT, re.MULTILINE
        )
        for name in re.findall(r"\w+", names)
    }
    assert documented == bounds
