"""A run as a picture: how its latencies are distributed, and what happened when.

The only file that needs matplotlib. Knows nothing of servers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from textwrap import fill
from typing import IO, TYPE_CHECKING

import numpy as np

from octavo_client.bench.report import token_gaps_s
from octavo_client.bench.trace import OK, Run, Trace
from octavo_client.errors import OctavoClientError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (9.0, 6.0)
_DOTS_PER_INCH = 80
_NUM_BINS = 60
_TITLE_WIDTH = 90
#: From such a ratio between the ends of an axis on, only powers of ten are labelled.
_MANY_LABELS = 1000

Points = tuple[Sequence[float], Sequence[float]]


def require_matplotlib() -> None:
    """Raise `OctavoClientError` if plots cannot be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OctavoClientError(
            "--plot needs matplotlib, which is not installed; run pip install matplotlib"
        )


def draw_run(run: Run, title: str, file: IO[bytes]) -> None:
    """Write a PNG of a run: three distributions, and tokens and requests over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(fill(title, _TITLE_WIDTH), fontsize="medium")
    ((first, gaps), (whole, over_time)) = figure.subplots(2, 2)
    served = [trace for trace in run.traces if not trace.is_failure]
    first_tokens = [trace.time_to_first_token_s for trace in served if trace.arrivals]
    _draw_distribution(first, "time to first token", "requests", first_tokens)
    token_gaps = [gap for trace in served for gap in token_gaps_s(trace)]
    _draw_distribution(gaps, "inter-token", "tokens", token_gaps)
    latencies = [trace.latency_s for trace in served if trace.outcome == OK]
    _draw_distribution(whole, "end to end", "requests", latencies)
    _draw_time(over_time, run)
    figure.savefig(file, format="png")


def cumulative(values: Sequence[float]) -> Points:
    """Return the values in milliseconds, rising, and the share of all that is not above each."""
    ordered = sorted(1e3 * value for value in values)
    return ordered, [place / len(ordered) for place in range(1, len(ordered) + 1)]


def tokens_over_time(traces: Sequence[Trace], edges_s: Sequence[float]) -> list[float]:
    """Return tokens a second that arrived between each two edges."""
    arrivals = [arrival for trace in traces for arrival in trace.arrivals]
    times = [arrival.at_s for arrival in arrivals]
    counts, _ = np.histogram(times, edges_s, weights=[each.num_tokens for each in arrivals])
    widths = [after - before for before, after in pairwise(edges_s)]
    return [float(count) / width for count, width in zip(counts, widths, strict=True)]


def in_flight(traces: Sequence[Trace]) -> Points:
    """Return the times at which requests were sent or ended, and how many were in flight then."""
    changes = sorted([(t.sent_s, 1) for t in traces] + [(t.end_s, -1) for t in traces])
    counts = np.cumsum([change for _, change in changes])
    return [time_s for time_s, _ in changes], [int(count) for count in counts]


def _draw_distribution(axes: Axes, name: str, of: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    axes.step(*cumulative(values), where="post")
    axes.set(title=name, xlabel="ms", ylabel=f"share of {of}", ylim=(0, 1))
    if values and min(values) > 0:
        axes.set_xscale("log")
        is_wide = max(values) > _MANY_LABELS * min(values)
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.grid(visible=True, alpha=0.3)


def _draw_time(axes: Axes, run: Run) -> None:
    edges = np.linspace(0.0, run.duration_s, _NUM_BINS + 1).tolist()
    rates = tokens_over_time(run.traces, edges)
    axes.stairs(rates, edges, fill=True, alpha=0.4)
    axes.set(title="over time", xlabel="s", ylabel="output tokens/s")
    requests = axes.twinx()
    requests.step(*in_flight(run.traces), where="post", color="tab:orange")
    requests.set_ylabel("requests in flight", color="tab:orange")
    requests.set_ylim(bottom=0)
