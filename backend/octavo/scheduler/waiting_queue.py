"""Sequences that wait, in the order of a policy, and how many requests they are of.

Knows nothing of why they wait, of blocks or of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Set
from heapq import heappop, heapreplace

from octavo.errors import EngineError
from octavo.scheduler.late_heap import LateHeap
from octavo.scheduler.policy import Policy
from octavo.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A queue for each of the policy's groups, and a heap of their heads' ranks.

    A group is sorted by arrival, so that a preempted sequence returns to its place.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, deque[Sequence]] = {}
        self._heap = LateHeap(self._groups, lambda name: policy.rank(self._groups[name][0]))
        self._num_sequences = 0
        self.num_tokens = 0
        """Known tokens of all that wait."""
        self.num_new = 0
        """Those that were never admitted; each is the only sequence of its request."""
        self.num_new_tokens = 0
        self._waiting: Counter[str] = Counter()
        self._swapped: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """Requests of which a sequence waits."""
        return len(self._waiting)

    @property
    def num_returned(self) -> int:
        """Sequences that were admitted before, had to make room and wait again."""
        return self._num_sequences - self.num_new

    @property
    def swapped_request_ids(self) -> Set[str]:
        """Requests of which a sequence waits whose KV is in host memory."""
        return self._swapped.keys()

    @property
    def head(self) -> Sequence | None:
        """The sequence that goes first by the policy's ranks of now; None if nobody waits."""
        lowest = self._heap.lowest()
        return None if lowest is None else self._groups[lowest[1]][0]

    def push(self, sequence: Sequence) -> None:
        """Put a sequence at its place by arrival.

        Nothing of it may change while it waits.
        """
        name = self._policy.group(sequence)
        group = self._groups.setdefault(name, deque())
        index = bisect_left(group, _place(sequence), key=_place)
        group.insert(index, sequence)
        self._count(sequence, 1)
        if index == 0:
            self._heap.push(name)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands.

        Raises:
            EngineError: it does not wait here.
        """
        name = self._policy.group(sequence)
        group = self._groups.get(name, deque())
        index = bisect_left(group, _place(sequence), key=_place)
        if index == len(group) or group[index] is not sequence:
            raise EngineError(f"{sequence} is not in the queue but must be to be removed")
        del group[index]
        if not group:
            del self._groups[name]
        self._count(sequence, -1)

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in the policy's order of now; the queue must not change meanwhile.

        Who looks at the first few does not pay for all groups.
        """
        heap, places = self._heap.entries(), Counter[Hashable]()
        while heap:
            listed_rank, name = heap[0]
            group, place = self._groups.get(name, ()), places[name]
            if place == len(group):
                heappop(heap)
                continue
            rank = self._policy.rank(group[place])
            if rank == listed_rank:
                yield group[place]
                places[name] += 1
            else:
                heapreplace(heap, (rank, name))

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._num_sequences += sign
        self.num_tokens += sign * sequence.num_tokens
        if not sequence.num_preemptions:
            self.num_new += sign
            self.num_new_tokens += sign * sequence.num_tokens
        is_swapped = sequence.status is SequenceStatus.SWAPPED
        for counts in (self._waiting, self._swapped) if is_swapped else (self._waiting,):
            counts[sequence.request_id] += sign
            if not counts[sequence.request_id]:
                del counts[sequence.request_id]


def _place(sequence: Sequence) -> tuple[int, int]:
    return (sequence.arrival_number, sequence.index)
