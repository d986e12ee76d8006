"""What the server's metrics say while the engine works, at idle, and after its death."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from octavo.request import FinishReason, StepStats
from octavo.triton_model.metrics import WRITE_INTERVAL_S, EngineMetrics
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

BLOCKS_USED = "octavo_kv_blocks_used"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def _gauge(pb_utils: Any, name: str) -> float:
    return (pb_utils.MetricFamily.series[name].values or [0])[-1]


@pytest.fixture
def written(pb_utils: Any) -> Callable[..., dict[str, float]]:
    """Return a function that observes figures one after the other and says what is written."""
    metrics = EngineMetrics(pb_utils, "octavo", "1")
    times = iter(range(1000))

    def write(*figures: StepStats, engine_up: bool = True) -> dict[str, float]:
        for stats in figures:
            metrics.observe(stats, engine_up)
        metrics.flush(next(times) * WRITE_INTERVAL_S * 2)
        series = pb_utils.MetricFamily.series.items()
        return {name: metric.values[-1] for name, metric in series if metric.values}

    return write


STATS = StepStats(
    num_running=1,
    num_waiting=2,
    num_blocks=100,
    num_free_blocks=60,
    num_preemptions_total=5,
    num_swapped=3,
    num_cached_blocks=50,
    num_host_blocks=30,
    num_used_host_blocks=20,
    num_cached_host_blocks=6,
    num_swap_preemptions_total=4,
    num_prefix_query_tokens_total=700,
    num_prefix_hit_tokens_total=600,
    num_requests_refused_total=8,
    num_tokens_refused_total=9,
)


def test_every_figure_is_written_under_its_name(written: Callable[..., dict[str, float]]) -> None:
    assert written(STATS) == {
        "octavo_engine_up": 1,
        "octavo_num_requests_running": 1,
        "octavo_num_requests_waiting": 2,
        "octavo_num_requests_swapped": 3,
        "octavo_kv_blocks_total": 100,
        "octavo_kv_blocks_used": 40,
        "octavo_kv_blocks_cached": 50,
        "octavo_cpu_kv_blocks_total": 30,
        "octavo_cpu_kv_blocks_used": 20,
        "octavo_cpu_kv_blocks_cached": 6,
        "octavo_prefix_cache_queries_total": 700,
        "octavo_prefix_cache_hits_total": 600,
        "octavo_preemptions_total swap": 4,
        "octavo_preemptions_total recompute": 1,
        "octavo_admission_rejections_total max_num_queued_requests": 8,
        "octavo_admission_rejections_total max_num_queued_tokens": 9,
    }


def test_counters_go_on_where_a_new_engine_begins_anew(
    written: Callable[..., dict[str, float]],
) -> None:
    hits = "octavo_prefix_cache_hits_total"
    assert written(STATS)[hits] == 600
    assert written(StepStats(), engine_up=False)[hits] == 600
    assert written(replace(STATS, num_prefix_hit_tokens_total=900))[hits] == 1500
    assert written(replace(STATS, num_prefix_hit_tokens_total=950), StepStats())[hits] == 1550
    assert written(replace(STATS, num_prefix_hit_tokens_total=1))[hits] == 1551


def test_figures_that_have_not_changed_are_not_written_again(
    written: Callable[..., dict[str, float]], pb_utils: Any
) -> None:
    written(STATS)
    written(replace(STATS, num_running=7))
    counts = {name: len(metric.values) for name, metric in pb_utils.MetricFamily.series.items()}
    assert counts.pop("octavo_num_requests_running") == 2
    ends = {name for name in counts if name.startswith("octavo_requests_total ")}
    assert {counts.pop(name) for name in ends} == {0}
    assert set(counts.values()) == {1}


def test_every_request_counts_once_by_how_it_ended(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(max_num_queued_requests=1)

    def ends() -> dict[str, float]:
        return {
            reason.value: _gauge(pb_utils, f"octavo_requests_total {reason.value}")
            for reason in FinishReason
        }

    ask(serving, "ab", max_tokens=2, n=2).wait_final()
    ask(serving, "ab", seed=fake_engine.REFUSED).wait_final()
    ask(serving, "ab", max_tokens=150, deadline_ms=30).wait_final()
    gone = ask(serving, "ab", max_tokens=150)
    gone.cancelled = True
    gone.wait_final()
    expected = {"stop": 0, "length": 1, "abort": 1, "deadline": 1, "error": 1}
    eventually(lambda: ends() == expected)


def test_a_request_whose_answer_cannot_be_sent_counts_once(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service()
    sender = ask(serving, "ab", max_tokens=20)
    sender.broken = True
    sender.wait_final()
    names = [f"octavo_requests_total {reason.value}" for reason in FinishReason]
    eventually(lambda: sum(_gauge(pb_utils, name) for name in names) == 1)


def test_the_documented_metrics_are_the_metrics() -> None:
    families: dict[str, tuple[str, str]] = {}
    labels: dict[str, dict[str, list[str]]] = {}

    class Family:
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, name: str, description: str, kind: str) -> None:
            families[name] = (kind, description)
            self.labels = labels.setdefault(name, {})

        def Metric(self, labels: dict[str, str]) -> object:
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
    rows = re.findall(r"^\| (`octavo_\w+`) \| (.*?) \|(.*?)\| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert [(name, kind, own.strip(), text) for name, kind, own, text in rows] == made


def test_counters_are_exact_after_the_engine_was_killed(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(process=True)
    queries = "octavo_prefix_cache_queries_total"
    hits = "octavo_prefix_cache_hits_total"
    for _ in range(3):
        ask(serving, "abcdefghij", max_tokens=1).wait_final()
    eventually(lambda: _gauge(pb_utils, queries) == 30)
    assert _gauge(pb_utils, hits) == 18
    ask(serving, "x", seed=fake_engine.DIES).wait_final()
    eventually(lambda: serving.is_ready)
    for _ in range(2):
        ask(serving, "abcdefghij", max_tokens=1).wait_final()
    eventually(lambda: _gauge(pb_utils, queries) == 50)
    assert _gauge(pb_utils, hits) == 27
    values = pb_utils.MetricFamily.series[queries].values
    assert values == sorted(values)


def test_gauges_show_the_load_and_are_right_at_idle(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service()
    eventually(lambda: _gauge(pb_utils, "octavo_kv_blocks_total") == 10_000)
    assert _gauge(pb_utils, "octavo_engine_up") == 1
    senders = [ask(serving, "ab", max_tokens=150) for _ in range(4)]
    for sender in senders:
        sender.wait_final()
    names = [f"octavo_num_requests_{kind}" for kind in ("running", "waiting")]
    series = {name: pb_utils.MetricFamily.series[name].values for name in (*names, BLOCKS_USED)}
    eventually(lambda: all(values[-1] == 0 for values in series.values()))
    assert [max(values) for values in series.values()] == [2, 2, 2]


def test_gauges_are_written_ten_times_a_second_at_most(
    make_service: MakeService, ask: Ask, pb_utils: Any
) -> None:
    serving = make_service()
    started = time.monotonic()
    for _ in range(100):
        ask(serving, "ab", max_tokens=1).wait_final()
    elapsed_s = time.monotonic() - started
    for metric in pb_utils.MetricFamily.series.values():
        assert len(metric.values) <= elapsed_s / 0.1 + 2
