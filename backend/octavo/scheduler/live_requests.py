"""Which sequences answer which request, and when the request must have ended.

Knows nothing of queues or blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from octavo.errors import EngineError
from octavo.scheduler.deadlines import Deadlines
from octavo.sequence import Sequence


class LiveRequests:
    """Sequences that have not ended, by request."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Sequence]] = {}
        self._deadlines = Deadlines()
        self._num_arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for group in self._groups.values() for sequence in group)

    def add(self, sequence: Sequence) -> None:
        """Take the first sequence of a request in, and number it in order of arrival."""
        self._num_arrivals += 1
        sequence.arrival_number = self._num_arrivals
        request = sequence.request
        self._groups[request.request_id] = [sequence]
        if request.deadline_s is not None:
            self._deadlines.add(request.request_id, request.deadline_s)

    def add_fork(self, sequence: Sequence) -> None:
        """Take another sequence of a live request in."""
        self._groups[sequence.request_id].append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and with the last one the request."""
        group = self._groups[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request_id]
            self._deadlines.discard(sequence.request_id)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Return the live sequences of a request, none if it has ended."""
        return list(self._groups.get(request_id, ()))

    def check_integrity(self, queued: Iterable[Sequence]) -> None:
        """Raise EngineError unless those who live are queued, each once."""
        found = Counter((sequence.request_id, sequence.index) for sequence in queued)
        if found != Counter((sequence.request_id, sequence.index) for sequence in self):
            raise EngineError(f"queues hold {dict(found)} but live are {list(self)}")

    def pop_overdue(self, now_s: float) -> list[str]:
        """Forget the deadlines that have passed, and return whose they were, earliest first."""
        return self._deadlines.pop_due(now_s)
