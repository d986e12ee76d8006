"""A report as tables for a terminal. Knows nothing of how its figures came about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from octavo_client.bench.report import Distribution, Report
from octavo_client.printable import printable

_GAP = 2
#: A loop that wakes later than this now and then blurs what it measures.
_MUCH_LAG_S = 0.010
_MUCH_CPU = 0.5


class ReportView:
    """A table of latencies, and below it what else there is to say.

    Args:
        counted: what the server itself counted meanwhile; empty if nobody asked it.
    """

    def __init__(self, report: Report, counted: Mapping[str, int]) -> None:
        self._report = report
        self._counted = counted

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._latencies()
        yield Text()
        rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
        for name, text in self._rows():
            rows.add_row(name, Text(text))
        yield rows

    def _latencies(self) -> Table:
        titles = ("mean", "p50", "p90", "p95", "p99", "max", "count")
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("ms")
        for title in titles:
            table.add_column(title, justify="right")
        for name, values in (
            ("time to first token", self._report.time_to_first_token_s),
            ("inter-token", self._report.inter_token_s),
            ("end to end", self._report.end_to_end_s),
        ):
            table.add_row(name, *_cells(values))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        report = self._report
        yield "requests", self._outcomes()
        for code, error in report.first_errors.items():
            yield f"first {code}", printable(error)
        yield "duration", f"{report.duration_s:.2f} s"
        yield "requests/s", f"{report.requests_per_s:.2f}"
        yield "output", f"{report.output_tokens_per_s:,.1f} tokens/s, {report.num_output_tokens:,}"
        yield "input", f"{report.input_tokens_per_s:,.1f} tokens/s, {report.num_input_tokens:,}"
        yield "in flight", f"{report.concurrency:.2f} on average"
        yield "response", f"{report.tokens_per_response:.2f} tokens on average"
        if report.cached_share is not None:
            yield "prefix cache", f"{report.cached_share:.1%} of the prompt tokens"
        yield "generator", self._generator()
        if self._is_short_of_cpu():
            yield "warning", "the generator was short of CPU, which blurs the latencies"
        for name, count in self._counted.items():
            yield "server counted", f"{count:,} {name.removesuffix('_total').replace('_', ' ')}"

    def _outcomes(self) -> str:
        report = self._report
        failures = sum(report.failures.values())
        by_code = ", ".join(f"{count:,} {code}" for code, count in report.failures.items())
        parts = [
            f"{report.num_ok:,} ok",
            f"{report.num_cancelled:,} cancelled",
            f"{failures:,} failed" + (f" ({by_code})" if by_code else ""),
            f"{report.num_interrupted:,} interrupted" if report.num_interrupted else "",
        ]
        return ", ".join(part for part in parts if part)

    def _generator(self) -> str:
        report, lag = self._report, self._report.generator_lag_s
        late = f", {1e3 * lag.p99:.1f} ms late at p99" if lag else ""
        return (
            f"{report.generator_cpu_us_per_token:.0f} µs of CPU a token, "
            f"{report.generator_cpu_share:.1%} of a core{late}"
        )

    def _is_short_of_cpu(self) -> bool:
        lag = self._report.generator_lag_s
        is_late = lag is not None and lag.p99 > _MUCH_LAG_S
        return is_late or self._report.generator_cpu_share > _MUCH_CPU


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 6 + ["0"]
    times = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return [*(f"{1e3 * value:,.1f}" for value in times), f"{values.count:,}"]
