"""What is known of a model in words: each figure with its unit, `-` where the server tells none.

Knows nothing of widths, colours or connections.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo_client.metrics_change import Change, last_bound, quantile, values_of
from octavo_client.metrics_page import Histogram, Series
from octavo_client.top.history import Trend

Row = tuple[str, list[str]]
"""A label, and the parts that stand behind it."""

UNKNOWN = "-"
_QUEUES = ("running", "waiting", "swapped")
_LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
    ("step", "step_duration_seconds"),
)
_COUNTS = (
    ("finished", "requests_total"),
    ("preempted", "preemptions_total"),
    ("rejected", "admission_rejections_total"),
)


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with separators."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return a duration with three digits and the unit that suits it."""
    if seconds is None:
        return UNKNOWN
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000.0, "ms")
    if value >= 99.95:
        return f"{value:,.0f} {unit}"
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}"


def engine_state(trend: Trend) -> tuple[str, bool]:
    """Return what is known of the engine, and whether all is well."""
    up = trend.now.gauges.get("engine_up")
    restarts = trend.now.counters.get(("engine_restarts_total", ""))
    state = {None: "engine unknown", 1.0: "engine up"}.get(up, "engine down")
    told = "" if restarts is None else f", {number(restarts)} restart{'s' * (restarts != 1)}"
    return state + told, up == 1.0


def now_rows(trend: Trend) -> list[Row]:
    """Return the requests by where they are, and the tokens a second since the last look."""
    gauges = trend.now.gauges
    queues = [f"{number(gauges.get(f'num_requests_{queue}'))} {queue}" for queue in _QUEUES]
    tokens = [
        f"{number(_rate(trend.last, 'generation_tokens_total'), 1)} generated",
        f"{number(_rate(trend.last, 'prompt_tokens_total'), 1)} of prompts",
    ]
    return [("requests", queues), ("tokens/s", tokens)]


def latency_rows(trend: Trend) -> list[tuple[str, str, str]]:
    """Return name, median and 99th percentile of each duration in the window."""
    histograms = trend.window.histograms
    return [
        (label, _percentile(histograms.get(name), 0.5), _percentile(histograms.get(name), 0.99))
        for label, name in _LATENCIES
    ]


def count_rows(trend: Trend) -> list[Row]:
    """Return what happened in the window, and behind each figure in brackets what ever did."""
    recent_hits, all_hits = _hits(trend.window.counters), _hits(trend.now.counters)
    rows = [("prefix hits", [f"{recent_hits} ({all_hits})"])]
    for label, name in _COUNTS:
        recent, ever = trend.window.of(name), values_of(trend.now.counters, name)
        parts = [
            f"{number(recent.get(kind, 0.0))} {kind} ({number(count)})"
            for kind, count in sorted(ever.items())
            if count
        ]
        rows.append((label, parts or ["none" if ever else UNKNOWN]))
    steps = _rate(trend.window, "engine_steps_total")
    rows.append(("steps/s", [number(steps, 1)]))
    return rows


def _rate(change: Change | None, name: str) -> float | None:
    return change.rate(name) if change is not None else None


def _hits(counters: Mapping[Series, float]) -> str:
    """Return the share of the prompt tokens looked up that were found."""
    queries = counters.get(("prefix_cache_queries_total", ""), 0.0)
    hits = counters.get(("prefix_cache_hits_total", ""), 0.0)
    return f"{100.0 * hits / queries:.1f} %" if queries else UNKNOWN


def _percentile(histogram: Histogram | None, share: float) -> str:
    value = quantile(histogram, share) if histogram is not None else None
    if histogram is not None and value is not None and value == last_bound(histogram):
        return f"over {duration(value)}"
    return duration(value)
