"""The figures of a run, from what came of its requests: pure functions of plain data.

docs/benchmarking.md defines each figure. Knows nothing of servers or terminals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from octavo_client.bench.trace import CANCELLED, INTERRUPTED, OK, Run, Trace


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one kind; percentiles are interpolated linearly between the nearest two."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Return the distribution of values, None if there are none."""
        array = np.fromiter(values, np.float64)
        if not len(array):
            return None
        p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
        return cls(len(array), float(array.mean()), p50, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of a run; times in seconds."""

    duration_s: float
    num_ok: int
    num_cancelled: int
    num_interrupted: int
    failures: dict[str, int]
    """Requests that failed, by code."""
    first_errors: dict[str, str]
    """What was told of the first failure of each code, where anything was."""
    time_to_first_token_s: Distribution | None
    inter_token_s: Distribution | None
    end_to_end_s: Distribution | None
    num_input_tokens: int
    num_output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    concurrency: float
    """Requests in flight, on average."""
    tokens_per_response: float
    cached_share: float | None
    """Of the prompt tokens; None if no answer told."""
    generator_cpu_us_per_token: float
    generator_cpu_share: float
    """Of one core."""
    generator_lag_s: Distribution | None
    """By how much the generator's event loop woke too late."""


def make_report(run: Run) -> Report:
    """Compute the figures of a run."""
    served = [trace for trace in run.traces if not trace.is_failure]
    outcomes = Counter(trace.outcome for trace in run.traces)
    num_input_tokens = sum(trace.num_input_tokens for trace in served if trace.arrivals)
    num_output_tokens = sum(trace.num_output_tokens for trace in run.traces)
    num_responses = sum(len(trace.arrivals) for trace in run.traces)
    return Report(
        duration_s=run.duration_s,
        num_ok=outcomes[OK],
        num_cancelled=outcomes[CANCELLED],
        num_interrupted=outcomes[INTERRUPTED],
        failures=dict(sorted(Counter(t.outcome for t in run.traces if t.is_failure).items())),
        first_errors={t.outcome: t.error for t in reversed(run.traces) if t.is_failure and t.error},
        time_to_first_token_s=Distribution.of(
            trace.time_to_first_token_s for trace in served if trace.arrivals
        ),
        inter_token_s=Distribution.of(gap for trace in served for gap in token_gaps_s(trace)),
        end_to_end_s=Distribution.of(t.latency_s for t in served if t.outcome == OK),
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        input_tokens_per_s=num_input_tokens / run.duration_s,
        output_tokens_per_s=num_output_tokens / run.duration_s,
        requests_per_s=outcomes[OK] / run.duration_s,
        concurrency=sum(trace.end_s - trace.sent_s for trace in run.traces) / run.duration_s,
        tokens_per_response=num_output_tokens / max(num_responses, 1),
        cached_share=_cached_share(served),
        generator_cpu_us_per_token=1e6 * run.cpu_s / max(num_output_tokens, 1),
        generator_cpu_share=run.cpu_s / run.duration_s,
        generator_lag_s=Distribution.of(run.lags_s),
    )


def token_gaps_s(trace: Trace) -> Iterator[float]:
    """Yield the seconds before each token but those of the first response.

    Tokens that came together in one response share the time since the response before equally.
    """
    for before, arrival in pairwise(trace.arrivals):
        yield from [(arrival.at_s - before.at_s) / arrival.num_tokens] * arrival.num_tokens


def _cached_share(traces: Iterable[Trace]) -> float | None:
    cached, asked = 0, 0
    for trace in traces:
        if trace.cached_tokens is not None:
            cached += trace.cached_tokens
            asked += trace.num_input_tokens
    return cached / asked if asked else None
