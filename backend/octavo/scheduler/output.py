"""The scheduler's decision for one step, and what comes back for it, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.adapter import AdapterLoad
from octavo.cache.block_copies import BlockCopies
from octavo.request import TokenLogprobs, TokenOutput
from octavo.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    Its tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)` are computed. If
    they are its last known ones, `draws` holds the sequences that draw a token from the last row:
    itself, and with the first token of a request of n > 1 the forks that begin there.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    draws: tuple[Sequence, ...]


class ScoredPrompt(NamedTuple):
    """Tokens of a prompt of which a step finds out how likely they are.

    The first is the one behind `first_row` of the step's tokens, the others follow.
    """

    sequence: Sequence
    first_row: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Who runs in this step, who had to make room, and which blocks are copied before."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...] = ()
    copies: BlockCopies = field(default_factory=BlockCopies)
    ended: tuple[TokenOutput, ...] = ()
    """Last outputs of sequences that ended before the step, past their deadlines."""
    scored: tuple[ScoredPrompt, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()
    """Adapters that are to be read, into slots that nothing uses any more."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_scheduled_tokens for item in self.scheduled)

    @property
    def num_prefills(self) -> int:
        """Sequences of which tokens of the prompt are computed; to be asked after `advance`."""
        return sum(
            sequence.num_computed_tokens - count < sequence.num_prompt_tokens
            for sequence, count, _ in self.scheduled
        )

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """Sequences that draw a token in this step, one a row of logits."""
        return tuple(sequence for item in self.scheduled for sequence in item.draws)


class SampledToken(NamedTuple):
    """What the sampler drew for one row; `logprobs` only when they were asked for.

    A `token_id` below 0 says that nothing can be drawn: the row holds NaN or infinity, or rules out
    every token.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
