"""From what was seen to promises kept or broken, as a table and as JSON.

Knows nothing of servers.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.faults import Outage
from benchmarks.soak.traffic import End, Record
from rich.console import Console
from rich.table import Table

RECOVERED_SHARE, RECOVERY_S = 0.95, 10.0
WINDOW_S = 3.0
#: A refusal may arrive a moment before or after the token that ends an outage.
_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that must hold; what depends on a quiet machine is not counted but measured."""

    name: str
    seen: str
    allowed: str
    is_kept: bool
    is_counted: bool = True


def judge_requests(records: Sequence[Record], outages: Sequence[Outage]) -> list[Promise]:
    """Say whether each request ended once, and as it should."""
    ends = Counter(record.end for record in records)
    unexplained = [
        record
        for record in records
        if record.end is End.UNAVAILABLE
        and not any(
            record.sent_s <= outage.end_s + _SLACK_S and outage.start_s <= record.ended_s
            for outage in outages
        )
    ]
    reasons = Counter(r.reason for r in records if r.end is End.BROKEN)
    reasons.update(f"without a fault: {record.reason}" for record in unexplained)
    told = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    broken = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(5))
    return [
        Promise(
            f"one final answer for each of {len(records):,} requests",
            "; ".join(filter(None, [told, broken])),
            "no broken promise, none refused without a fault",
            not reasons,
        ),
        *(
            Promise(f"requests {end}", f"{ends[end]:,}", "at least 1", ends[end] > 0)
            for end in (End.FINISHED, End.CANCELLED, End.REFUSED)
        ),
    ]


def judge_recovery(
    tokens: Sequence[tuple[float, int]], outages: Sequence[Outage], start_s: float, end_s: float
) -> list[Promise]:
    """Say how long after each fault the throughput was back."""
    rates = _window_rates(tokens, start_s, end_s)
    steady = [
        rate
        for at_s, rate in rates
        if not any(fault.start_s - WINDOW_S <= at_s <= fault.start_s + 20.0 for fault in outages)
    ]
    usual = statistics.median(steady or [rate for _, rate in rates])
    promises = []
    for number, outage in enumerate(outages, 1):
        back_s = next(
            (
                at_s - outage.start_s
                for at_s, rate in rates
                if at_s >= outage.end_s - WINDOW_S / 2 and rate >= RECOVERED_SHARE * usual
            ),
            None,
        )
        told = "never" if back_s is None else f"{back_s:.1f} s"
        promises.append(
            Promise(
                f"fault {number}, {outage.kind}: back to {RECOVERED_SHARE:.0%} of {usual:,.0f} "
                "tokens/s",
                f"{told}; first token after {outage.end_s - outage.start_s:.1f} s",
                f"within {RECOVERY_S:g} s",
                back_s is not None and back_s <= RECOVERY_S,
                is_counted=False,
            )
        )
    return promises


def _window_rates(
    tokens: Sequence[tuple[float, int]], start_s: float, end_s: float
) -> list[tuple[float, float]]:
    """Return tokens a second in windows, by the time at which each window begins."""
    step_s = 0.1
    bins = [0] * (int((end_s - start_s) / step_s) + 1)
    for at_s, count in tokens:
        if start_s <= at_s < end_s:
            bins[int((at_s - start_s) / step_s)] += count
    width = round(WINDOW_S / step_s)
    return [
        (start_s + first * step_s, sum(bins[first : first + width]) / WINDOW_S)
        for first in range(len(bins) - width)
    ]


def show(promises: Sequence[Promise], console: Console) -> None:
    """Print the promises as a table."""
    table = Table(title="Soak")
    for column in ("promise", "seen", "allowed", "kept"):
        table.add_column(column, overflow="fold")
    for promise in promises:
        row = (promise.name, promise.seen, promise.allowed, "yes" if promise.is_kept else "NO")
        table.add_row(*row, style=None if promise.is_kept else "bold red")
    console.print(table)
