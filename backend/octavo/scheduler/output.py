"""The scheduler's decision for one step, and what comes back for it, as data."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Its tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)` are computed;
    `samples` says whether they are its last known ones, so that a token is drawn.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Who runs in this step, and who had to make room."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_scheduled_tokens for item in self.scheduled)

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """Sequences that draw a token in this step, in row order."""
        return tuple(item.sequence for item in self.scheduled if item.samples)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler drew for one row; `logprob` only when it was asked for."""

    token_id: int
    logprob: float | None = None
