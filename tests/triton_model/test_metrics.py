"""What the server's metrics say while the engine works, at idle, and after its death."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from octavo.request import EngineInfo, FinishReason, StepStats
from octavo.triton_model import metric_series, metrics_thread
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.request_meter import NewTokens
from octavo.triton_model.request_record import RequestRecord
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

BLOCKS_USED = "octavo_kv_blocks_used"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def _gauge(pb_utils: Any, name: str) -> float:
    return (pb_utils.MetricFamily.series[name].values or [0])[-1]


def _samples(pb_utils: Any, name: str) -> list[float]:
    return list(pb_utils.MetricFamily.series[name].values)


def _latest(pb_utils: Any) -> dict[str, float]:
    """Return the last value of every series that was written, but for histograms."""
    series = pb_utils.MetricFamily.series.items()
    return {
        name: metric.values[-1]
        for name, metric in series
        if metric.values and metric.kind != "histogram"
    }


@pytest.fixture
def metrics(pb_utils: Any) -> EngineMetrics:
    """Return metrics that no thread writes, for which time stands still; an engine is ready."""
    metrics = EngineMetrics(pb_utils, "octavo", "1", clock=lambda: 0.0)
    metrics.engine_ready(INFO)
    return metrics


INFO = EngineInfo(
    max_model_len=1000,
    num_blocks=100,
    block_size=16,
    vocab_size=300,
    eos_token_ids=(),
    default_max_tokens=16,
    max_num_seqs=64,
    num_host_blocks=30,
)
STATS = StepStats(
    step=7,
    num_running=1,
    num_waiting=2,
    num_blocks=100,
    num_free_blocks=60,
    num_scheduled_tokens=48,
    num_context=1,
    step_s=0.25,
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


def test_every_figure_of_the_engine_is_written_under_its_name(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    metrics.step(STATS)
    metrics.write()
    assert _latest(pb_utils) == {
        "octavo_engine_up": 1,
        "octavo_num_requests_running": 1,
        "octavo_num_requests_waiting": 2,
        "octavo_num_requests_swapped": 3,
        "octavo_kv_cache_usage_ratio": 0.4,
        "octavo_kv_blocks_total": 100,
        "octavo_kv_blocks_used": 40,
        "octavo_kv_blocks_cached": 50,
        "octavo_cpu_kv_blocks_total": 30,
        "octavo_cpu_kv_blocks_used": 20,
        "octavo_cpu_kv_blocks_cached": 6,
        "nv_trt_llm_request_metrics waiting": 2,
        "nv_trt_llm_request_metrics context": 1,
        "nv_trt_llm_request_metrics scheduled": 1,
        "nv_trt_llm_request_metrics max": 64,
        "nv_trt_llm_request_metrics active": 3,
        "nv_trt_llm_kv_cache_block_metrics fraction": 0.4,
        "nv_trt_llm_kv_cache_block_metrics tokens_per": 16,
        "nv_trt_llm_kv_cache_block_metrics used": 40,
        "nv_trt_llm_kv_cache_block_metrics free": 60,
        "nv_trt_llm_kv_cache_block_metrics max": 100,
        "octavo_engine_steps_total": 7,
        "octavo_prefix_cache_queries_total": 700,
        "octavo_prefix_cache_hits_total": 600,
        "octavo_preemptions_total swap": 4,
        "octavo_preemptions_total recompute": 1,
        "octavo_admission_rejections_total max_num_queued_requests": 8,
        "octavo_admission_rejections_total max_num_queued_tokens": 9,
    }


def test_a_step_is_a_sample_once_however_often_it_is_told(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    idle = replace(STATS, num_scheduled_tokens=0, step_s=0.0)
    for stats in (STATS, idle, replace(STATS, step=8, num_scheduled_tokens=2), idle):
        metrics.step(stats)
    metrics.write()
    assert _samples(pb_utils, "octavo_iteration_tokens") == [48, 2]
    assert _samples(pb_utils, "octavo_step_duration_seconds") == [0.25, 0.25]


def test_when_the_engine_dies_gauges_fall_to_zero_and_counters_go_on(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    hits, restarts = "octavo_prefix_cache_hits_total", "octavo_engine_restarts_total"

    def figures() -> dict[str, float]:
        metrics.write()
        return _latest(pb_utils)

    metrics.step(STATS)
    before = figures()
    metrics.engine_gone()
    dead = figures()
    gauges = [name for name in before if not name.partition(" ")[0].endswith("_total")]
    gauges += ["octavo_kv_blocks_total", "octavo_cpu_kv_blocks_total"]
    assert {dead[name] for name in gauges} == {0}
    assert {name: dead[name] for name in before if name not in gauges} == {
        name: before[name] for name in before if name not in gauges
    }
    metrics.engine_ready(INFO)
    metrics.step(replace(STATS, step=1, num_prefix_hit_tokens_total=900))
    again = figures()
    assert (again["octavo_engine_up"], again[restarts], again[hits]) == (1, 1, 1500)
    assert again["octavo_engine_steps_total"] == 8
    assert _samples(pb_utils, "octavo_iteration_tokens") == [48, 48]
    metrics.step(replace(STATS, num_prefix_hit_tokens_total=950))
    metrics.engine_gone()
    metrics.engine_ready(INFO)
    metrics.step(replace(STATS, num_prefix_hit_tokens_total=1))
    assert figures()[hits] == 1551


def test_figures_that_have_not_changed_are_not_written_again(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    metrics.step(STATS)
    metrics.write()
    metrics.step(replace(STATS, num_running=7))
    metrics.write()
    counts = {name: len(metric.values) for name, metric in pb_utils.MetricFamily.series.items()}
    changed = {
        "octavo_num_requests_running",
        "nv_trt_llm_request_metrics scheduled",
        "nv_trt_llm_request_metrics active",
    }
    assert {name for name, count in counts.items() if count == 2} == changed
    assert max(counts.values()) == 2


def test_gauges_are_written_again_every_second_for_another_instance_may_have_written_them(
    pb_utils: Any,
) -> None:
    times = iter((0.0, 0.9, 1.1, 1.2))
    metrics = EngineMetrics(pb_utils, "octavo", "1", clock=lambda: next(times))
    metrics.engine_ready(INFO)
    for _ in range(4):
        metrics.write()
    assert _samples(pb_utils, "octavo_engine_up") == [1, 1]
    assert _samples(pb_utils, "octavo_kv_blocks_total") == [100, 100]


def test_tokens_that_come_together_share_the_time_since_those_before(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    for tokens in (
        NewTokens(3, None, 0.5),
        NewTokens(1, 0.25),
        NewTokens(0),
        NewTokens(2, 0.5),
        NewTokens(1, None),
    ):
        metrics.count_tokens(tokens, num_prompt_tokens=9)
    metrics.write()
    figures = _latest(pb_utils)
    assert figures["octavo_prompt_tokens_total"] == 9
    assert figures["octavo_generation_tokens_total"] == 7
    assert _samples(pb_utils, "octavo_time_to_first_token_seconds") == [0.5]
    assert _samples(pb_utils, "octavo_inter_token_latency_seconds") == [0.25, 0.25, 0.25]


def test_a_write_that_fails_is_made_up_for_by_the_next(
    metrics: EngineMetrics, pb_utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True

    def observe(self: Any, value: float) -> None:
        if broken:
            raise RuntimeError("no round trip")
        self.values.append(value)

    metric = type(pb_utils.MetricFamily.series["octavo_inter_token_latency_seconds"])
    monkeypatch.setattr(metric, "observe", observe)
    for interval_s in (0.1, 0.2):
        metrics.count_tokens(NewTokens(1, interval_s), 9)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            metrics.write()
    broken = False
    metrics.write()
    assert _latest(pb_utils)["octavo_generation_tokens_total"] == 2
    assert _samples(pb_utils, "octavo_inter_token_latency_seconds") == [0.1, 0.2]


def test_samples_that_the_server_does_not_take_fill_no_memory(
    metrics: EngineMetrics,
    pb_utils: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(metric_series, "MAX_WAITING_SAMPLES", 3)
    for _ in range(5):
        metrics.count_tokens(NewTokens(1, 0.1), 9)
    metrics.write()
    assert len(_samples(pb_utils, "octavo_inter_token_latency_seconds")) == 3
    (record,) = caplog.records
    message = "octavo_inter_token_latency_seconds has lost 2 samples: too many came"
    assert record.getMessage() == message


def test_the_last_figures_are_written_before_the_thread_ends(pb_utils: Any) -> None:
    threads = set(threading.enumerate())
    metrics = EngineMetrics(pb_utils, "octavo", "1")
    metrics.start()
    metrics.engine_ready(INFO)
    metrics.step(STATS)
    metrics.engine_gone()
    metrics.close()
    figures = _latest(pb_utils)
    assert (figures["octavo_engine_up"], figures["octavo_engine_steps_total"]) == (0, 7)
    assert set(threading.enumerate()) == threads


def test_a_server_that_hangs_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_thread, "CLOSE_TIMEOUT_S", 0.05)
    answer = threading.Event()
    thread = metrics_thread.MetricsThread(answer.wait)
    thread.start()
    thread.close()
    assert "could not be written within 0.05 s" in caplog.text
    answer.set()


def test_a_thread_that_cannot_write_tries_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_thread, "FAILURE_PAUSE_S", 0.0)
    faults, written = [RuntimeError("no round trip")], threading.Event()

    def write() -> None:
        if faults:
            raise faults.pop()
        written.set()

    thread = metrics_thread.MetricsThread(write)
    thread.start()
    thread.wake()
    assert written.wait(10.0)
    thread.close()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics could not be written; they are kept for the next time"
    ]


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
    ask(serving, "ab", max_tokens=150, stop="bab").wait_final()
    gone = ask(serving, "ab", max_tokens=150)
    gone.cancelled = True
    gone.wait_final()
    expected = {"stop": 1, "length": 1, "abort": 1, "deadline": 1, "error": 1}
    eventually(lambda: ends() == expected)


REJECTIONS = "octavo_admission_rejections_total"


def test_who_is_turned_away_is_counted_by_reason_and_as_an_end(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(process=True)
    ask(serving, "a" * 100_000).wait_final()
    for mistake in ({"temperature": -1}, {"seed": fake_engine.REFUSED}):
        ask(serving, "ab", **mistake).wait_final()
    running = ask(serving, "ab", max_tokens=10**6)
    ask(serving, "ab", max_tokens=9, seed=fake_engine.DIES)
    running.wait_final()
    ask(serving, "ab").wait_final()
    serving.close()
    ask(serving, "ab").wait_final()
    figures = _latest(pb_utils)
    rejections = {name: count for name, count in figures.items() if name.startswith(REJECTIONS)}
    assert rejections == {
        f"{REJECTIONS} prompt_too_long": 1,
        f"{REJECTIONS} invalid_request": 2,
        f"{REJECTIONS} engine_down": 1,
    }
    assert figures["octavo_requests_total error"] == 6


def test_lengths_and_times_are_of_requests_that_did_not_end_in_an_error(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType, pb_utils: Any
) -> None:
    serving = make_service()
    ask(serving, "abc", max_tokens=5, n=2).wait_final()
    ask(serving, "abcd", max_tokens=150, stop="cd").wait_final()
    gone = ask(serving, "ab", stream=True, max_tokens=10**6)
    gone.wait_for(lambda sender: len(sender.responses) > 0)
    gone.cancelled = True
    gone.wait_final()
    ask(serving, "ab", temperature=-1).wait_final()
    serving.close()
    assert _samples(pb_utils, "octavo_request_prompt_tokens") == [3, 4]
    assert _samples(pb_utils, "octavo_request_generation_tokens") == [10, 4]
    assert _samples(pb_utils, "octavo_request_queue_time_seconds") == [fake_engine.QUEUE_S] * 2
    first, whole = (
        _samples(pb_utils, f"octavo_{name}_seconds")
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert (len(first), len(whole)) == (3, 2)
    assert 0 < first[0] < whole[0]
    figures = _latest(pb_utils)
    assert figures["octavo_prompt_tokens_total"] == 9
    num_intervals = len(_samples(pb_utils, "octavo_inter_token_latency_seconds"))
    assert figures["octavo_generation_tokens_total"] - num_intervals == 4  # as many as answers


def test_every_reporter_is_told_once_of_every_request_even_if_another_fails(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise RuntimeError("disk full")

    serving = make_service(reporters=(fail, told.append))
    ask(serving, "ab", max_tokens=3).wait_final()
    ask(serving, "abcd", max_tokens=150, stop="bc").wait_final()
    ask(serving, "ab", temperature=-1).wait_final()
    gone = ask(serving, "ab", max_tokens=10**6)
    gone.cancelled = True
    gone.wait_final()
    serving.close()
    ends = [(r.finish_reason.value, r.num_prompt_tokens, r.was_refused) for r in told]
    assert sorted(ends) == sorted(
        [("length", 2, False), ("stop", 4, False), ("error", 0, True), ("abort", 2, False)]
    )
    stopped = next(record for record in told if record.finish_reason is FinishReason.STOP)
    assert stopped.num_generated_tokens == 3
    assert stopped.timing is not None
    assert stopped.timing.queue_s == fake_engine.QUEUE_S
    assert stopped.first_token_s is not None
    assert stopped.arrival_s < stopped.first_token_s < stopped.end_s
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("a finished request could not be reported") == 4


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
    assert _gauge(pb_utils, "octavo_engine_restarts_total") == 1
    eventually(lambda: _gauge(pb_utils, "octavo_generation_tokens_total") == 5)
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


def test_gauges_and_counters_are_written_ten_times_a_second_at_most(
    make_service: MakeService, ask: Ask, pb_utils: Any
) -> None:
    serving = make_service()
    started = time.monotonic()
    for _ in range(100):
        ask(serving, "ab", max_tokens=1).wait_final()
    elapsed_s = time.monotonic() - started
    for metric in pb_utils.MetricFamily.series.values():
        if metric.kind != "histogram":
            assert len(metric.values) <= elapsed_s / 0.1 + 2
