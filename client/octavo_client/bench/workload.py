"""What is asked of the server, and when: a stream of jobs drawn from a seed.

Each aspect has random numbers of its own, so that another cancel share, say, leaves prompts,
lengths and arrivals as they were. Knows nothing of the server or the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from octavo_client.bench.lengths import Lengths

_SEED_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Workload:
    """What all jobs have in common; with a seed it says every job."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    token_ids: tuple[int, int] = (100, 9_999)
    """Prompts are random ids from the first of these to the last, both included."""
    shared_prefix: float = 0.0
    """Share of each prompt that is the beginning of one common text, in [0, 1]."""
    cancel_share: float = 0.0
    """Share of the jobs that are cancelled after a random number of tokens, in [0, 1]."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    """Token ids."""
    num_output_tokens: int
    """To generate, unless it is cancelled."""
    cancel_after: int | None
    """Cancelled once so many tokens have come, fewer than it asks for; None means never."""
    seed: int
    """Of its sampling."""


def draw_jobs(workload: Workload) -> Iterator[Job]:
    """Yield jobs without end; the same workload yields the same jobs."""
    prompts, outputs, ids, cancels, seeds = (
        _random(workload.seed, aspect) for aspect in ("prompt", "output", "ids", "cancel", "seed")
    )
    common: list[int] = []
    common_ids = _random(workload.seed, "common")
    while True:
        length = workload.prompt_tokens.draw(prompts)
        num_shared = round(workload.shared_prefix * length)
        common += _draw_ids(workload, common_ids, num_shared - len(common))
        own = _draw_ids(workload, ids, length - num_shared)
        num_output_tokens = workload.output_tokens.draw(outputs)
        # Both are drawn for every job, so that a larger share cancels the same jobs and more.
        is_cancelled = cancels.random() < workload.cancel_share
        after = 1 + int(cancels.random() * (num_output_tokens - 1))
        yield Job(
            (*common[:num_shared], *own),
            num_output_tokens,
            after if is_cancelled and num_output_tokens > 1 else None,
            seeds.randrange(_SEED_LIMIT),
        )


def draw_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the times, in seconds from the start, of a Poisson process of `rate` a second."""
    random = _random(seed, "arrival")
    time_s = 0.0
    while True:
        time_s += random.expovariate(rate)
        yield time_s


def _random(seed: int, aspect: str) -> Random:
    return Random(f"{seed} {aspect}")


def _draw_ids(workload: Workload, random: Random, count: int) -> list[int]:
    first, last = workload.token_ids
    span = last + 1 - first
    return [first + int(random.random() * span) for _ in range(count)]
