"""What the server's metrics say while the engine works, at idle, and after its death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from octavo.request import EngineInfo, StepStats
from octavo.triton_model import metric_series
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.request_meter import NewTokens
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

BLOCKS_USED = "octavo_kv_blocks_used"


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
    num_resident_adapters=4,
    num_adapter_loads_total=11,
    num_failed_adapter_loads_total=2,
    adapter_wait_s_total=1.5,
)


def test_every_figure_of_the_engine_is_written_under_its_name(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    metrics.step(STATS)
    metrics.write()
    assert pb_utils.MetricFamily.latest() == {
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
        "octavo_lora_adapters_resident": 4,
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
        "octavo_lora_adapter_loads_total loaded": 11,
        "octavo_lora_adapter_loads_total failed": 2,
        "octavo_lora_wait_seconds_total": 1.5,
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
    assert pb_utils.MetricFamily.samples("octavo_iteration_tokens") == [48, 2]
    assert pb_utils.MetricFamily.samples("octavo_step_duration_seconds") == [0.25, 0.25]


def test_when_the_engine_dies_gauges_fall_to_zero_and_counters_go_on(
    metrics: EngineMetrics, pb_utils: Any
) -> None:
    hits, restarts = "octavo_prefix_cache_hits_total", "octavo_engine_restarts_total"

    def figures() -> dict[str, float]:
        metrics.write()
        return pb_utils.MetricFamily.latest()

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
    assert pb_utils.MetricFamily.samples("octavo_iteration_tokens") == [48, 48]
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
    assert pb_utils.MetricFamily.samples("octavo_engine_up") == [1, 1]
    assert pb_utils.MetricFamily.samples("octavo_kv_blocks_total") == [100, 100]


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
    figures = pb_utils.MetricFamily.latest()
    assert figures["octavo_prompt_tokens_total"] == 9
    assert figures["octavo_generation_tokens_total"] == 7
    assert pb_utils.MetricFamily.samples("octavo_time_to_first_token_seconds") == [0.5]
    assert pb_utils.MetricFamily.samples("octavo_inter_token_latency_seconds") == [0.25, 0.25, 0.25]


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
    assert pb_utils.MetricFamily.latest()["octavo_generation_tokens_total"] == 2
    assert pb_utils.MetricFamily.samples("octavo_inter_token_latency_seconds") == [0.1, 0.2]


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
    assert len(pb_utils.MetricFamily.samples("octavo_inter_token_latency_seconds")) == 3
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
    figures = pb_utils.MetricFamily.latest()
    assert (figures["octavo_engine_up"], figures["octavo_engine_steps_total"]) == (0, 7)
    assert set(threading.enumerate()) == threads


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
    eventually(lambda: pb_utils.MetricFamily.value(queries) == 30)
    assert pb_utils.MetricFamily.value(hits) == 18
    ask(serving, "x", seed=fake_engine.DIES).wait_final()
    eventually(lambda: serving.is_ready)
    for _ in range(2):
        ask(serving, "abcdefghij", max_tokens=1).wait_final()
    eventually(lambda: pb_utils.MetricFamily.value(queries) == 50)
    assert pb_utils.MetricFamily.value(hits) == 27
    assert pb_utils.MetricFamily.value("octavo_engine_restarts_total") == 1
    eventually(lambda: pb_utils.MetricFamily.value("octavo_generation_tokens_total") == 5)
    values = pb_utils.MetricFamily.series[queries].values
    assert values == sorted(values)


def test_gauges_show_the_load_and_are_right_at_idle(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service()
    eventually(lambda: pb_utils.MetricFamily.value("octavo_kv_blocks_total") == 10_000)
    assert pb_utils.MetricFamily.value("octavo_engine_up") == 1
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
