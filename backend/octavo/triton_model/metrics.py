"""The engine's figures as gauges and counters of Triton's own metrics endpoint.

Every write is a round trip to the server, so only what changed is written, and not more often than
every 100 ms. Knows nothing of where the figures come from. docs/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.request import FinishReason, StepStats
from octavo.triton_model.pb_utils import Metric, PbUtils
from octavo.triton_model.request_record import RequestRecord

WRITE_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Series:
    """One series; those of the same name are one family."""

    name: str
    description: str
    read: Callable[[StepStats], int]
    label: tuple[str, str] | None = None


_GAUGES = (
    _Series(
        "octavo_num_requests_running",
        "Requests of which a sequence runs",
        lambda s: s.num_running,
    ),
    _Series(
        "octavo_num_requests_waiting",
        "Requests of which a sequence is in the queue",
        lambda s: s.num_waiting,
    ),
    _Series(
        "octavo_num_requests_swapped",
        "Requests of which a sequence has its KV in host memory or on its way back",
        lambda s: s.num_swapped,
    ),
    _Series("octavo_kv_blocks_total", "KV blocks of the engine", lambda s: s.num_blocks),
    _Series(
        "octavo_kv_blocks_used",
        "KV blocks that sequences own",
        lambda s: s.num_blocks - s.num_free_blocks,
    ),
    _Series(
        "octavo_kv_blocks_cached",
        "Free KV blocks whose content may still be reused",
        lambda s: s.num_cached_blocks,
    ),
    _Series(
        "octavo_cpu_kv_blocks_total",
        "Host blocks, which make up the swap space",
        lambda s: s.num_host_blocks,
    ),
    _Series(
        "octavo_cpu_kv_blocks_used",
        "Host blocks (swap space) that swapped sequences own",
        lambda s: s.num_used_host_blocks,
    ),
    _Series(
        "octavo_cpu_kv_blocks_cached",
        "Other host blocks (swap space) whose content may still be reused",
        lambda s: s.num_cached_host_blocks,
    ),
)
_PREEMPTIONS = ("octavo_preemptions_total", "Times that a sequence had to make room")
_REJECTIONS = ("octavo_admission_rejections_total", "Requests refused, too many waiting already")
_COUNTERS = (
    _Series(
        "octavo_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.num_prefix_query_tokens_total,
    ),
    _Series(
        "octavo_prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache",
        lambda s: s.num_prefix_hit_tokens_total,
    ),
    _Series(*_PREEMPTIONS, lambda s: s.num_swap_preemptions_total, ("kind", "swap")),
    _Series(
        *_PREEMPTIONS,
        lambda s: s.num_preemptions_total - s.num_swap_preemptions_total,
        ("kind", "recompute"),
    ),
    _Series(
        *_REJECTIONS,
        lambda s: s.num_requests_refused_total,
        ("reason", "max_num_queued_requests"),
    ),
    _Series(
        *_REJECTIONS, lambda s: s.num_tokens_refused_total, ("reason", "max_num_queued_tokens")
    ),
)
_ENDS = (
    "octavo_requests_total",
    "Requests that got their final answer; of several answers, the first tells how",
)
_ENGINE_UP = ("octavo_engine_up", "1 while the engine runs, 0 while it is dead or starting")


class _Gauge:
    """A figure that goes up and down, as it should be and as the server has it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._wanted = 0
        self._written: int | None = None

    @property
    def is_written(self) -> bool:
        return self._wanted == self._written

    def observe(self, value: int) -> None:
        self._wanted = value

    def write(self) -> None:
        self._metric.set(self._wanted)
        self._written = self._wanted


class _Counter:
    """A total that only grows, although what is counted may begin anew."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._last = 0
        self._unwritten = 0

    @property
    def is_written(self) -> bool:
        return not self._unwritten

    def add(self, count: int) -> None:
        self._unwritten += count

    def observe(self, value: int) -> None:
        self._unwritten += value - self._last if value >= self._last else value
        self._last = value

    def write(self) -> None:
        self._metric.increment(self._unwritten)
        self._unwritten = 0


class EngineMetrics:
    """Gauges and counters of one model; one thread writes them.

    Counters go on over a restart of the engine, whose own totals begin anew: between two engines
    the writer observes figures of zero.
    """

    def __init__(self, pb_utils: PbUtils, model: str, version: str) -> None:
        self._pb_utils = pb_utils
        self._labels = {"model": model, "version": version}
        # The server forgets a metric when its family is collected, so families are kept.
        self._families: dict[str, Any] = {}
        kind = pb_utils.MetricFamily
        self._engine_up = _Gauge(self._make(*_ENGINE_UP, None, kind.GAUGE))
        self._series: list[tuple[_Gauge | _Counter, Callable[[StepStats], int]]] = [
            *(
                (_Gauge(self._make(each.name, each.description, each.label, kind.GAUGE)), each.read)
                for each in _GAUGES
            ),
            *(
                (
                    _Counter(self._make(each.name, each.description, each.label, kind.COUNTER)),
                    each.read,
                )
                for each in _COUNTERS
            ),
        ]
        self._ends = {
            reason: _Counter(self._make(*_ENDS, ("finish_reason", reason.value), kind.COUNTER))
            for reason in FinishReason
        }
        self._last_write_s = float("-inf")

    def _make(
        self, name: str, description: str, label: tuple[str, str] | None, kind: Any
    ) -> Metric:
        if name not in self._families:
            make_family = self._pb_utils.MetricFamily
            self._families[name] = make_family(name=name, description=description, kind=kind)
        family = self._families[name]
        own = () if label is None else (label,)
        metric: Metric = family.Metric(labels={**self._labels, **dict(own)})
        return metric

    def observe(self, stats: StepStats, engine_up: bool) -> None:
        """Take the latest figures; nothing is written yet."""
        self._engine_up.observe(int(engine_up))
        for series, read in self._series:
            series.observe(read(stats))

    def report(self, record: RequestRecord) -> None:
        """Count a request that has its final answer; nothing is written yet."""
        self._ends[record.finish_reason].add(1)

    def flush(self, now_s: float) -> float | None:
        """Write what changed if enough time has passed.

        Returns the seconds until the next call is due, or None when everything is written.
        """
        every = (self._engine_up, *(series for series, _ in self._series), *self._ends.values())
        changed = [series for series in every if not series.is_written]
        if not changed:
            return None
        remaining_s = self._last_write_s + WRITE_INTERVAL_S - now_s
        if remaining_s > 0.0:
            return remaining_s
        for series in changed:
            series.write()
        self._last_write_s = now_s
        return None
