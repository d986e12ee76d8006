"""The curve over the number of queued requests: what the scheduler takes for a step, and for each.

The real scheduler and KV cache manager run without a model. 64 sequences decode, and whoever ends
is replaced in the queue at once, so that its length stays. The lengths of the queue take turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.curves import Curve, Line, Panel, Point
from benchmarks.dry_run import make_scheduler
from benchmarks.quiet import quietly

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SampledToken
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import Sequence

NUM_QUEUED = (0, 10, 100, 1000, 10_000)
NUM_SEATS, NUM_PROMPT_TOKENS, LEAST_OUTPUT_TOKENS, NUM_PRIORITIES = 64, 96, 32, 3
NUM_TURNS, NUM_STEPS, NUM_WARM_UP_STEPS = 10, 150, 100


@dataclass(frozen=True, slots=True)
class Case:
    """Why requests wait, and in which order."""

    key: str
    title: str
    policy: str
    num_blocks: int


CASES = (
    Case("seats", "no seat is free", "fcfs", 4096),
    Case("memory", "no block is free", "fcfs", 500),
    Case("priority", "three priorities", "priority", 4096),
    Case("fair", "fair, a tenant each", "fair", 4096),
)


class Play:
    """One scheduler with so many requests in its queue; `steps_s` and `adds_s` grow."""

    def __init__(self, case: Case, num_queued: int) -> None:
        self.steps_s: list[float] = []
        self.adds_s: list[float] = []
        self._num_queued = num_queued
        self._requests = _requests()
        # The limit is never met, but asked.
        limits = SchedulerLimits(NUM_SEATS, 512, 8192, 2 * max(NUM_QUEUED))
        cache = KVCacheManager(case.num_blocks, 16)
        self.scheduler: Scheduler = make_scheduler(cache, limits, policy=case.policy)
        for _ in range(NUM_SEATS):
            self._add()
        self.run(NUM_WARM_UP_STEPS)
        self.steps_s.clear()
        self.adds_s.clear()

    def run(self, num_steps: int) -> None:
        """Run steps, and time each, and each request that comes into the queue."""
        scheduler = self.scheduler
        for _ in range(num_steps):
            started_s = time.perf_counter()
            output = scheduler.schedule(0.0)
            scheduler.advance(output)
            scheduler.expect(output.sampling)
            scheduler.update(output, (SampledToken(1),) * len(output.sampling), 0.0)
            self.steps_s.append(time.perf_counter() - started_s)
            while len(scheduler.waiting) < self._num_queued or (
                len(scheduler.waiting) + len(scheduler.running) < NUM_SEATS
            ):
                self._add()

    def _add(self) -> None:
        sequence = Sequence(next(self._requests))
        started_s = time.perf_counter()
        self.scheduler.add(sequence)
        self.adds_s.append(time.perf_counter() - started_s)


def over_queue(quick: bool) -> list[Point]:
    """Measure queues of up to 10,000 requests."""
    points: dict[int, Point] = {
        count: {"queued": count, "foreign_share": 0.0} for count in NUM_QUEUED
    }
    for case in CASES:
        plays, watch = quietly(partial(play_in_turns, case, 1 if quick else NUM_TURNS))
        for count, play in plays.items():
            point = points[count]
            point[f"{case.key}_step_s"] = statistics.median(play.steps_s)
            point[f"{case.key}_add_s"] = statistics.median(play.adds_s)
            point["foreign_share"] = max(point["foreign_share"], watch.foreign_share)
    return list(points.values())


def play_in_turns(case: Case, num_turns: int) -> dict[int, Play]:
    """Return one play for each length of the queue."""
    plays = {count: Play(case, count) for count in NUM_QUEUED}
    for _ in range(num_turns):
        for play in plays.values():
            play.run(NUM_STEPS)
    return plays


def _requests() -> Iterator[Request]:
    """Yield requests that have nothing in common, and end at different times."""
    for number in itertools.count():
        first = number * NUM_PROMPT_TOKENS
        yield Request(
            str(number),
            tuple(range(first, first + NUM_PROMPT_TOKENS)),
            # 7 and the number of seats share no factor, so that all lengths come.
            SamplingParams(
                temperature=0,
                max_tokens=LEAST_OUTPUT_TOKENS + 7 * number % NUM_SEATS,
                ignore_eos=True,
                seed=0,
            ),
            0.0,
            priority=number % NUM_PRIORITIES,
            tenant=str(number),
        )


QUEUE = Curve(
    "queue",
    "queued",
    "requests in the queue",
    (
        Panel("µs a step", tuple(Line(f"{case.key}_step_s", case.title, 1e6) for case in CASES)),
        Panel(
            "µs to queue a request",
            tuple(Line(f"{case.key}_add_s", case.title, 1e6, 1) for case in CASES),
        ),
    ),
    over_queue,
)
