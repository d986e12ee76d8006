"""Sequences that have a seat: those that run, in order, and those whose KV is coming back.

Knows nothing of the queue, of blocks or of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from octavo.errors import EngineError
from octavo.scheduler.policy import Policy
from octavo.sequence import Sequence


class Seating:
    """`running` is in the policy's order; `restoring` is by transfer id, outside of it.

    A sequence takes `num_seats` seats, those that its forks will need included.
    """

    def __init__(self, num_seats: int, policy: Policy) -> None:
        self.running: list[Sequence] = []
        self.restoring: dict[int, Sequence] = {}
        self.num_free_seats = num_seats
        self._num_seats = num_seats
        self._policy = policy

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.running, self.restoring.values())

    def place_of(self, sequence: Sequence) -> int:
        """Return the place among the running where `sequence` belongs."""
        low, high = 0, len(self.running)
        while low < high:
            middle = (low + high) // 2
            if self._policy.outranks(sequence, self.running[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def run(self, sequence: Sequence, place: int) -> None:
        """Give a sequence seats, and a place among the running."""
        self.num_free_seats -= sequence.num_seats
        self.running.insert(place, sequence)

    def restore(self, sequence: Sequence, transfer_id: int) -> None:
        """Give a sequence seats until its transfer is done."""
        self.num_free_seats -= sequence.num_seats
        self.restoring[transfer_id] = sequence

    def arrive(self, transfer_id: int) -> Sequence:
        """Take the seats of the sequence whose transfer is done, and return it."""
        sequence = self.restoring.pop(transfer_id)
        self.num_free_seats += sequence.num_seats
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Take the seats and the place of a running sequence."""
        self.running.remove(sequence)
        self.num_free_seats += sequence.num_seats

    def fork(self, parent: Sequence, fork: Sequence) -> None:
        """Let `fork` run behind `parent` and its earlier forks, on a seat that was kept for it."""
        parent.num_seats -= 1
        self.running.insert(self.running.index(parent) + fork.index, fork)

    def check_integrity(self) -> None:
        """Raise EngineError unless every seat is free or taken by a sequence here."""
        num_taken = sum(sequence.num_seats for sequence in self)
        if num_taken + self.num_free_seats != self._num_seats:
            raise EngineError(
                f"{num_taken} seats are taken and {self.num_free_seats} free of {self._num_seats}"
            )
