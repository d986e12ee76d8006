"""Batches of whole requests: all of one begin together, and the next begins when all have ended.

Each row reserves the longest prompt and the longest answer of its batch, so that nobody ever has to
make room. Knows nothing of queues, seats or the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from octavo.scheduler.policy import Policy
from octavo.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What one batch may hold, beside what limits and blocks allow."""

    equal_lengths: bool
    """Whether all prompts must be of one length."""


class WholeBatches:
    """Who may join a batch.

    Args:
        rule: of the model.
        policy: whose order the queue is in.
        num_blocks: that a batch may reserve.
        block_size: tokens in one of them.
    """

    def __init__(self, rule: BatchRule, policy: Policy, num_blocks: int, block_size: int) -> None:
        self._rule = rule
        self._policy = policy
        self._num_blocks = num_blocks
        self._block_size = block_size

    def joining(self, batch: List[Sequence], queue: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield those of a queue who may be in the batch by their kind, in order.

        The first of all decides of what kind it is. Whoever is of another kind is passed by those
        who are of its own, as far as the policy lets them, and is the first itself before long.
        `batch` may grow meanwhile; nobody joins one that has begun.
        """
        if any(row.num_computed_tokens or row.num_steps_under_way for row in batch):
            return
        passed: Sequence | None = None
        for sequence in queue:
            if passed is not None and not self._policy.may_pass(sequence, passed):
                return
            if self._suits(batch, sequence):
                yield sequence
            elif passed is None:
                passed = sequence

    def has_room(self, batch: List[Sequence], newcomer: Sequence) -> bool:
        """Return whether all rows can have what the longest among them needs."""
        if not batch:
            return True
        rows = [*batch, newcomer]
        longest = max(row.num_tokens for row in rows) + max(map(_most_to_come, rows))
        num_rows = sum(row.num_seats for row in rows)
        return num_rows * -(-longest // self._block_size) <= self._num_blocks

    def _suits(self, batch: List[Sequence], newcomer: Sequence) -> bool:
        """Return whether `newcomer` is of the kind of those who are in the batch, if any.

        A prompt whose tokens are scored is alone, for then the logits of all of it are kept.
        """
        if not batch:
            return True
        if batch[0].num_unscored_tokens or newcomer.num_unscored_tokens:
            return False
        return not self._rule.equal_lengths or newcomer.num_tokens == batch[0].num_tokens


def _most_to_come(sequence: Sequence) -> int:
    """Return how many tokens it may still get; its limit may not have been set yet."""
    most = sequence.max_num_tokens - sequence.num_tokens
    return most if sequence.params.max_tokens is None else min(most, sequence.params.max_tokens)
