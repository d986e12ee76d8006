"""Plays every workload against every side in turns, and keeps what was seen.

A play counts when other processes took at most 5 % of the CPU; else it is repeated, with other
prompts. A side that fails is stopped and told of; the others go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from benchmarks.peers.loads import Load, Workload
from benchmarks.peers.processes import resident_bytes
from benchmarks.peers.side import Reply, Side, Unavailable
from benchmarks.quiet import MOST_ATTEMPTS, QuietWatch

OWN_NAME = "octavo"
CAPACITY_WORKLOAD = "mixed"
_WARM_UP_PLAY = 1_000_000


@dataclass(frozen=True, slots=True)
class Play:
    """One side's play of one workload; times in seconds."""

    side: str
    workload: str
    round: int
    tokens_per_s: float
    requests_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    per_token_p50_s: float
    """Median over requests of the mean time between tokens."""
    between_tokens_p99_s: float
    """Of all times between tokens."""
    resident_bytes: int
    """Of all its processes when the last token had come."""
    foreign_share: float
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A side that could not be played, or not to the end."""

    side: str
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played."""

    workloads: tuple[Workload, ...]
    rounds: int
    is_quick: bool
    capacity: float | None
    """Requests per second that Poisson arrivals are a share of; None: the best peer's own."""


class Measurement:
    """Plays a plan with sides that are installed; `plays` and `failures` grow meanwhile."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plays: list[Play] = []
        self.failures: list[Failure] = []
        self.capacity = plan.capacity
        self._plan = plan
        self._say = say
        self._ready: list[Side] = []

    def run(self, sides: Sequence[Side], after_workload: Callable[[], None]) -> None:
        """Start the sides, play all, and stop them whatever happens."""
        try:
            for side in sides:
                self._start(side)
            for workload in self._plan.workloads:
                for round_number in range(self._plan.rounds):
                    for side in tuple(self._ready):
                        self._play(side, workload, round_number)
                if workload.name == CAPACITY_WORKLOAD and self.capacity is None:
                    self.capacity = best_rate(self.plays)
                after_workload()
        finally:
            for side in sides:
                side.stop()

    def _start(self, side: Side) -> None:
        self._say(f"starting {side.title}")
        try:
            side.start()
            # Arrivals without a given capacity come after a workload that has none.
            load = self._plan.workloads[0].load(
                _WARM_UP_PLAY, self._plan.is_quick, self.capacity or 1.0
            )
            side.play(load)
            side.pause()
        except Unavailable as error:
            self._give_up(side, "start", error)
        else:
            self._ready.append(side)

    def _play(self, side: Side, workload: Workload, round_number: int) -> None:
        side.resume()
        try:
            self.plays.append(self._counted(side, workload, round_number))
        except Unavailable as error:
            self._give_up(side, workload.name, error)
        else:
            side.pause()

    def _give_up(self, side: Side, stage: str, error: Unavailable) -> None:
        self.failures.append(Failure(side.name, stage, str(error)))
        self._say(f"{side.title} is out: {error}")
        side.stop()
        if side in self._ready:
            self._ready.remove(side)

    def _counted(self, side: Side, workload: Workload, round_number: int) -> Play:
        """Play until a play was quiet, at most `MOST_ATTEMPTS` times; return the last."""
        attempts = 1 if self._plan.is_quick else MOST_ATTEMPTS
        for attempt in range(attempts):
            number = round_number * MOST_ATTEMPTS + attempt
            load = workload.load(number, self._plan.is_quick, self.capacity)
            with QuietWatch(roots=[side.process_id]) as watch:
                replies = side.play(load)
            check(load, replies)
            weight = resident_bytes(side.process_id)
            play = summary(side.name, workload.name, round_number, replies, weight, watch)
            self._say(line(play))
            if play.is_valid:
                break
        return play


def check(load: Load, replies: Sequence[Reply]) -> None:
    """Raise `Unavailable` unless every answer has the length that was asked for."""
    for job, reply in zip(load.jobs, replies, strict=True):
        if len(reply.token_s) != job.num_output_tokens:
            raise Unavailable(
                f"an answer has {len(reply.token_s)} tokens, not {job.num_output_tokens}"
            )


def summary(
    side: str,
    workload: str,
    round_number: int,
    replies: Sequence[Reply],
    weight: int,
    watch: QuietWatch,
) -> Play:
    """Return the figures of a play."""
    end_s = max(reply.token_s[-1] for reply in replies)
    first_s = [reply.token_s[0] - reply.sent_s for reply in replies]
    per_token_s = [
        (reply.token_s[-1] - reply.token_s[0]) / (len(reply.token_s) - 1)
        for reply in replies
        if len(reply.token_s) > 1
    ]
    gaps_s = itertools.chain.from_iterable(pairwise(reply.token_s) for reply in replies)
    return Play(
        side,
        workload,
        round_number,
        tokens_per_s=sum(len(reply.token_s) for reply in replies) / end_s,
        requests_per_s=len(replies) / end_s,
        first_token_p50_s=float(np.median(first_s)),
        first_token_p99_s=float(np.percentile(first_s, 99)),
        per_token_p50_s=float(np.median(per_token_s)),
        between_tokens_p99_s=float(np.percentile([b - a for a, b in gaps_s], 99)),
        resident_bytes=weight,
        foreign_share=watch.foreign_share,
        is_valid=watch.is_valid,
    )


def best_rate(plays: Sequence[Play]) -> float | None:
    """Return the best peer's requests per second on the mixed workload, or None without peers."""
    rates: dict[str, list[float]] = {}
    for play in counting(plays):
        if play.workload == CAPACITY_WORKLOAD and play.side != OWN_NAME:
            rates.setdefault(play.side, []).append(play.requests_per_s)
    return max((float(np.median(each)) for each in rates.values()), default=None)


def counting(plays: Sequence[Play]) -> list[Play]:
    """Return the valid plays; where a side has none of a workload, all of that."""
    valid = {(play.side, play.workload) for play in plays if play.is_valid}
    return [play for play in plays if play.is_valid or (play.side, play.workload) not in valid]


def line(play: Play) -> str:
    """Return a play as one line."""
    void = "" if play.is_valid else "  VOID: the machine was busy"
    return (
        f"{play.workload:11} {play.side:11} {play.tokens_per_s:7.1f} tokens/s  first "
        f"{play.first_token_p50_s * 1e3:6.0f} ms  then {play.per_token_p50_s * 1e3:6.1f} ms  "
        f"{play.resident_bytes / 2**20:5.0f} MiB  others {play.foreign_share:5.1%}{void}"
    )
