"""Sequences that wait, in the order of a policy, and how many requests they are of.

Knows nothing of why they wait, of blocks or of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Set
from heapq import heapify, heappop, heappush, heapreplace

from octavo.errors import EngineError
from octavo.scheduler.policy import MAX_SPARE_ENTRIES, Policy
from octavo.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A queue for each of the policy's groups, and a heap of their heads' ranks.

    A group is sorted by arrival, so that a preempted sequence returns to its place. An entry of
    the heap may lag behind the head it stands for, for ranks rise; never be above it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, deque[Sequence]] = {}
        self._heap: list[tuple[tuple[float, ...], Hashable]] = []
        self._num_sequences = 0
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
    def swapped_request_ids(self) -> Set[str]:
        """Requests of which a sequence waits whose KV is in host memory."""
        return self._swapped.keys()

    @property
    def head(self) -> Sequence | None:
        """The sequence that goes first by the policy's ranks of now; None if nobody waits."""
        heap = self._heap
        while heap:
            listed_rank, name = heap[0]
            group = self._groups.get(name)
            if group is None:
                heappop(heap)
                continue
            rank = self._policy.rank(group[0])
            if rank == listed_rank:
                return group[0]
            heapreplace(heap, (rank, name))
        return None

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
            self._list(name)

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
        heap, places = self._heap.copy(), Counter[Hashable]()
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

    def would_lead(self, sequence: Sequence) -> bool:
        """Return whether a sequence that is not here would be the head."""
        head = self.head
        return head is None or self._policy.rank(sequence) < self._policy.rank(head)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._num_sequences += sign
        if not sequence.num_preemptions:
            self.num_new += sign
            self.num_new_tokens += sign * sequence.num_tokens
        is_swapped = sequence.status is SequenceStatus.SWAPPED
        for counts in (self._waiting, self._swapped) if is_swapped else (self._waiting,):
            counts[sequence.request_id] += sign
            if not counts[sequence.request_id]:
                del counts[sequence.request_id]

    def _list(self, name: Hashable) -> None:
        heappush(self._heap, (self._policy.rank(self._groups[name][0]), name))
        if len(self._heap) > 2 * len(self._groups) + MAX_SPARE_ENTRIES:
            groups = self._groups.items()
            self._heap = [(self._policy.rank(group[0]), name) for name, group in groups]
            heapify(self._heap)


def _place(sequence: Sequence) -> tuple[int, int]:
    return (sequence.arrival_number, sequence.index)
