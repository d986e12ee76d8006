"""Sequences that wait, in the order of a policy, and how many requests they are of.

New ones whose adapter is not open are held: they keep their place, and others pass them. Knows
nothing of why an adapter is open, of blocks or of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Set
from heapq import heappop, heapreplace
from itertools import chain
from typing import NamedTuple

from octavo.errors import EngineError
from octavo.scheduler.late_heap import LateHeap
from octavo.scheduler.policy import Policy
from octavo.sequence import Sequence, SequenceStatus


class _Name(NamedTuple):
    """What the sequences of one group have in common."""

    policy: Hashable
    adapter: int | None
    is_returned: bool


class WaitingQueue:
    """Groups of those who follow each other by arrival alone, and a heap of their heads' ranks.

    A group is sorted by arrival, so that a preempted sequence returns to its place. All of a group
    are of one of the policy's groups and want the same adapter, and have been admitted before or
    have not; so it is held as a whole.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[_Name, deque[Sequence]] = {}
        """Those that may come in."""
        self._held: dict[_Name, deque[Sequence]] = {}
        """The others."""
        self._open_adapters: Set[int] = frozenset()
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
    def num_held(self) -> int:
        """Sequences, and so requests, that wait for their adapter."""
        return sum(map(len, self._held.values()))

    @property
    def swapped_request_ids(self) -> Set[str]:
        """Requests of which a sequence waits whose KV is in host memory."""
        return self._swapped.keys()

    @property
    def head(self) -> Sequence | None:
        """Of those who may come in, the first by the policy's ranks of now; None if nobody may."""
        lowest = self._heap.lowest()
        return None if lowest is None else self._groups[lowest[1]][0]

    def wanted_adapters(self) -> list[int]:
        """Return the adapters that new sequences want, each once, in the order of the first."""
        heads = [
            (self._policy.rank(group[0]), name.adapter)
            for name, group in self._all_groups()
            if name.adapter is not None and not name.is_returned
        ]
        return list(dict.fromkeys(adapter for _, adapter in sorted(heads)))

    def returned_adapters(self) -> set[int]:
        """Return the adapters of sequences that were admitted before."""
        return {
            name.adapter
            for name, _ in self._all_groups()
            if name.is_returned and name.adapter is not None
        }

    def new_with(self, adapter: int) -> list[Sequence]:
        """Return the new sequences that want an adapter."""
        return [
            sequence
            for name, group in self._all_groups()
            if name.adapter == adapter and not name.is_returned
            for sequence in group
        ]

    def open_to(self, adapters: Set[int]) -> None:
        """Let new sequences come in if they want none or one of these adapters; hold the others."""
        if adapters == self._open_adapters:
            return
        self._open_adapters = frozenset(adapters)
        for name in [name for name in self._groups if not self._is_open(name)]:
            self._held[name] = self._groups.pop(name)
        for name in [name for name in self._held if self._is_open(name)]:
            self._groups[name] = self._held.pop(name)
            self._heap.push(name)

    def is_open_to(self, sequence: Sequence) -> bool:
        """Return whether it is not held, or would not be if it waited here."""
        return self._is_open(self._name(sequence))

    def push(self, sequence: Sequence) -> None:
        """Put a sequence at its place by arrival.

        Nothing of it may change while it waits.
        """
        name = self._name(sequence)
        is_open = self._is_open(name)
        group = (self._groups if is_open else self._held).setdefault(name, deque())
        index = bisect_left(group, _place(sequence), key=_place)
        group.insert(index, sequence)
        self._count(sequence, 1)
        if index == 0 and is_open:
            self._heap.push(name)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands.

        Raises:
            EngineError: it does not wait here.
        """
        name = self._name(sequence)
        groups = self._groups if self._is_open(name) else self._held
        group = groups.get(name, deque())
        index = bisect_left(group, _place(sequence), key=_place)
        if index == len(group) or group[index] is not sequence:
            raise EngineError(f"{sequence} is not in the queue but must be to be removed")
        del group[index]
        if not group:
            del groups[name]
        self._count(sequence, -1)

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over who may come in, then over who is held; nothing may change meanwhile."""
        return chain(self.admissible(), *self._held.values())

    def admissible(self) -> Iterator[Sequence]:
        """Iterate over who may come in, in the policy's order of now; nothing may change meanwhile.

        Who looks at the first few does not pay for all groups.
        """
        heap, places = self._heap.entries(), Counter[_Name]()
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

    def _name(self, sequence: Sequence) -> _Name:
        adapter = None if sequence.adapter is None else sequence.adapter.number
        return _Name(self._policy.group(sequence), adapter, sequence.num_preemptions > 0)

    def _is_open(self, name: _Name) -> bool:
        return name.adapter is None or name.is_returned or name.adapter in self._open_adapters

    def _all_groups(self) -> Iterable[tuple[_Name, deque[Sequence]]]:
        return chain(self._groups.items(), self._held.items())

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
