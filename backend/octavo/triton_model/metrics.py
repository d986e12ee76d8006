"""The figures of one model as metrics of Triton's own endpoint.

Those who know figures leave them here and never wait; a thread of its own writes them. Knows
nothing of the life of a request. docs/metrics.md lists them all and says what is counted when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.errors import EngineDead, PromptTooLong, RequestError
from octavo.request import EngineInfo, FinishReason, StepStats
from octavo.triton_model import metric_table as table
from octavo.triton_model.metric_series import Counter, Gauge, Histogram, Series
from octavo.triton_model.metrics_thread import MetricsThread
from octavo.triton_model.pb_utils import Metric, PbUtils
from octavo.triton_model.request_meter import NewTokens
from octavo.triton_model.request_record import RequestRecord

#: Gauges are written again this often though they have not changed: when a model is loaded with
#: other options, the instance that leaves sets to 0 what by then belongs to the one that came.
GAUGES_AGAIN_S = 1.0
_NO_ENGINE = EngineInfo(0, 0, 0, 0, (), 0, 0)
#: Why a request was turned away; first match wins. The engine counts what its queue refused.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (PromptTooLong, "prompt_too_long"),
    (RequestError, "invalid_request"),
    (EngineDead, "engine_down"),
)


class EngineMetrics:
    """Gauges, counters and histograms of one model.

    Counters go on over a restart of the engine, whose own totals begin anew. Any thread may call
    `report`; the other methods are for the thread that answers.
    """

    def __init__(
        self,
        pb_utils: PbUtils,
        model: str,
        version: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._family_kind = pb_utils.MetricFamily
        self._labels = {"model": model, "version": version}
        # The server forgets a metric when its family is collected, so families are kept.
        self._families: dict[str, Any] = {}
        self._info = _NO_ENGINE
        self._num_starts = 0
        self._last_step = 0
        self._clock = clock
        self._gauges_again_at_s = 0.0
        self._reports_lock = threading.Lock()
        self._thread = MetricsThread(self.write)
        self._make_engine_series()
        self._make_request_series()
        self._make_histograms()

    def start(self) -> None:
        """Begin to write what changes."""
        self._thread.start()

    def close(self) -> None:
        """Write what has changed since the last time, and end the thread."""
        self._thread.close()

    def engine_ready(self, info: EngineInfo) -> None:
        """Take note that an engine can serve, the first one or one after another's death."""
        self._info = info
        if self._num_starts:
            self._restarts.add(1)
        self._num_starts += 1
        self._engine_up.observe(1)
        self._observe(
            StepStats(
                num_blocks=info.num_blocks,
                num_free_blocks=info.num_blocks,
                num_host_blocks=info.num_host_blocks,
            )
        )

    def engine_gone(self) -> None:
        """Take note that there is no engine now: it holds nothing and its totals begin anew."""
        self._info, self._last_step = _NO_ENGINE, 0
        self._engine_up.observe(0)
        self._observe(StepStats())

    def step(self, stats: StepStats) -> None:
        """Take the engine's latest figures."""
        if stats.step > self._last_step:
            self._last_step = stats.step
            self._iteration_tokens.observe(stats.num_scheduled_tokens)
            self._step_duration.observe(stats.step_s)
        self._observe(stats)

    def count_tokens(self, tokens: NewTokens, num_prompt_tokens: int) -> None:
        """Count tokens that came of one answer, and the prompt if they are the first."""
        if not tokens.num_tokens:
            return
        self._generation_tokens.add(tokens.num_tokens)
        if tokens.first_after_s is not None:
            self._prompt_tokens.add(num_prompt_tokens)
            self._time_to_first_token.observe(tokens.first_after_s)
        if tokens.interval_s is not None:
            for _ in range(tokens.num_tokens):
                interval_s = tokens.interval_s / tokens.num_tokens
                self._inter_token_latency.observe(interval_s)
        self._thread.wake()

    def report(self, record: RequestRecord) -> None:
        """Count a request that has its final answer."""
        with self._reports_lock:
            self._ends[record.finish_reason].add(1)
            reasons = (name for kind, name in _REASONS if isinstance(record.error, kind))
            if record.was_refused and (reason := next(reasons, None)):
                self._rejections[reason].add(1)
        if record.timing is not None:
            self._queue_time.observe(record.timing.queue_s)
        if record.error is None:
            self._e2e_latency.observe(record.end_s - record.arrival_s)
            self._num_prompt_tokens.observe(record.num_prompt_tokens)
            self._num_generation_tokens.observe(record.num_generated_tokens)
        self._thread.wake()

    def write(self) -> None:
        """Write what has changed; for the thread of `start`, or for a caller that has none."""
        now_s = self._clock()
        if now_s >= self._gauges_again_at_s:
            self._gauges_again_at_s = now_s + GAUGES_AGAIN_S
            for series in self._all_series():
                if isinstance(series, Gauge):
                    series.write_again()
        for series in self._all_series():
            series.write()

    def _observe(self, stats: StepStats) -> None:
        for series, read in self._engine_series:
            series.observe(read(stats, self._info))
        self._thread.wake()

    def _all_series(self) -> Iterable[Series]:
        yield self._engine_up
        yield from (series for series, _ in self._engine_series)
        yield from (self._prompt_tokens, self._generation_tokens, self._restarts)
        yield from self._rejections.values()
        yield from self._ends.values()
        yield from self._histograms

    def _make_engine_series(self) -> None:
        self._engine_up = Gauge(self._make("GAUGE", *table.ENGINE_UP))
        self._engine_series: list[tuple[Gauge | Counter, table.Read]] = []
        for each in table.GAUGES:
            gauge = Gauge(self._make("GAUGE", each.name, each.meaning, each.label))
            self._engine_series.append((gauge, each.read))
        for each in table.ENGINE_TOTALS:
            counter = Counter(self._make("COUNTER", each.name, each.meaning, each.label))
            self._engine_series.append((counter, each.read))
        self._restarts = Counter(self._make("COUNTER", *table.RESTARTS))

    def _make_request_series(self) -> None:
        self._rejections = {
            reason: Counter(self._make("COUNTER", *table.REJECTIONS, ("reason", reason)))
            for _, reason in _REASONS
        }
        self._ends = {
            reason: Counter(self._make("COUNTER", *table.REQUESTS, ("finish_reason", reason.value)))
            for reason in FinishReason
        }
        self._prompt_tokens = Counter(self._make("COUNTER", *table.PROMPT_TOKENS))
        self._generation_tokens = Counter(self._make("COUNTER", *table.GENERATION_TOKENS))

    def _make_histograms(self) -> None:
        self._histograms: list[Histogram] = []
        self._time_to_first_token = self._make_histogram(table.TIME_TO_FIRST_TOKEN)
        self._inter_token_latency = self._make_histogram(table.INTER_TOKEN_LATENCY)
        self._e2e_latency = self._make_histogram(table.E2E_LATENCY)
        self._queue_time = self._make_histogram(table.QUEUE_TIME)
        self._num_prompt_tokens = self._make_histogram(table.NUM_PROMPT_TOKENS)
        self._num_generation_tokens = self._make_histogram(table.NUM_GENERATION_TOKENS)
        self._iteration_tokens = self._make_histogram(table.ITERATION_TOKENS)
        self._step_duration = self._make_histogram(table.STEP_DURATION)

    def _make_histogram(self, of: table.Distribution) -> Histogram:
        metric = self._make("HISTOGRAM", of.name, of.meaning, bounds=of.bounds)
        self._histograms.append(Histogram(of.name, metric))
        return self._histograms[-1]

    def _make(
        self,
        kind: str,
        name: str,
        meaning: str,
        label: tuple[str, str] | None = None,
        bounds: tuple[float, ...] = (),
    ) -> Metric:
        if name not in self._families:
            self._families[name] = self._family_kind(
                name=name, description=meaning, kind=getattr(self._family_kind, kind)
            )
        labels = self._labels if label is None else {**self._labels, label[0]: label[1]}
        buckets = {"buckets": list(bounds)} if bounds else {}
        metric: Metric = self._families[name].Metric(labels=labels, **buckets)
        return metric
