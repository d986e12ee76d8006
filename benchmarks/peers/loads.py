"""The workloads: seeded requests and their arrivals, the same token ids for every side.

Every play of a workload draws new prompts, so that no side finds them in its prefix cache; lengths
and arrivals are the same in every play. Knows nothing of the sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from benchmarks.workload import Job, mixed_workload

SEED = 0
QUICK_OUTPUT_TOKENS = 16
# Ids of ordinary text tokens in the demo model; control tokens lie below.
_FIRST_ID, _LAST_ID = 100, 49_000

Lengths = Callable[[int], list[tuple[int, int]]]
"""From a number of requests to each one's prompt and output length."""


@dataclass(frozen=True, slots=True)
class Load:
    """One play of a workload."""

    jobs: tuple[Job, ...]
    arrivals_s: tuple[float, ...]
    """When each request is sent at the earliest, in seconds from the start."""
    concurrency: int
    """Requests under way at most."""

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens all answers have together."""
        return sum(job.num_output_tokens for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths, sharing and arrivals of requests."""

    name: str
    title: str
    lengths: Lengths
    num_requests: int
    num_quick_requests: int
    concurrency: int | None = None
    """Requests under way at most; None: as many as have arrived."""
    num_shared_tokens: int = 0
    """Tokens with which every prompt begins."""
    capacity_share: float | None = None
    """Poisson arrivals at this share of the best peer's capacity; None: all at once."""

    def load(self, play: int, is_quick: bool, capacity: float | None) -> Load:
        """Return the requests of one play; `capacity` is in requests per second."""
        count = self.num_quick_requests if is_quick else self.num_requests
        lengths = self.lengths(count)
        if is_quick:
            lengths = [(prompt, min(output, QUICK_OUTPUT_TOKENS)) for prompt, output in lengths]
        random = np.random.default_rng((SEED, play))
        shared = _draw(random, self.num_shared_tokens)
        jobs = tuple(
            Job(shared + _draw(random, prompt - len(shared)), output) for prompt, output in lengths
        )
        return Load(jobs, self._arrivals(count, capacity), self.concurrency or count)

    def _arrivals(self, count: int, capacity: float | None) -> tuple[float, ...]:
        if self.capacity_share is None:
            return (0.0,) * count
        assert capacity is not None, "arrivals need a capacity"
        gaps = np.random.default_rng(SEED).exponential(
            1 / (self.capacity_share * capacity), size=count
        )
        return tuple(np.cumsum(gaps).tolist())


def mixed_lengths(count: int) -> list[tuple[int, int]]:
    """Return the lengths of the mixed workload."""
    jobs = mixed_workload(SEED, count)
    return [(len(job.prompt_token_ids), job.num_output_tokens) for job in jobs]


def equal_lengths(prompt: int, output: int) -> Lengths:
    """Return lengths that are the same for all requests."""
    return lambda count: [(prompt, output)] * count


WORKLOADS = (
    Workload("mixed", "mixed: 64 at once, 16 to 512 in, 8 to 256 out", mixed_lengths, 64, 6),
    Workload(
        "prefix",
        "shared prefix: 64 at once, 512 shared + 32 own in, 32 out",
        equal_lengths(544, 32),
        64,
        4,
        num_shared_tokens=512,
    ),
    Workload(
        "short",
        "short: 128 requests, 32 at a time, 20 in, 20 out",
        equal_lengths(20, 20),
        128,
        8,
        concurrency=32,
    ),
    Workload(
        "single",
        "single stream: 128 in, 128 out, one after the other",
        equal_lengths(128, 128),
        4,
        1,
        concurrency=1,
    ),
    *(
        Workload(
            f"poisson-{share:.0%}".rstrip("%"),
            f"Poisson arrivals of mixed requests at {share:.0%} of capacity",
            mixed_lengths,
            128,
            6,
            capacity_share=share,
        )
        for share in (0.5, 0.9)
    ),
)


def _draw(random: np.random.Generator, count: int) -> list[int]:
    drawn: list[int] = random.integers(_FIRST_ID, _LAST_ID, size=count).tolist()
    return drawn
