"""Which adapters are in memory: a new sequence is admitted only while its own is, and is open.

    cold      on disk; who wants it is held, and others pass
    coming    being read into a slot
    open      in a slot
    closed    in a slot that is promised to another: who was admitted with it ends, nobody new comes

The order of the queue decides. The first who is held gets a slot for its adapter: a free one, else
that of an adapter which nobody uses, rather one that nobody waits for either; else an adapter in
use is closed until nobody uses it. Then the next is looked at. Of several it is the adapter with
which somebody was admitted least recently, and never one that is wanted further ahead in the queue.
So nobody loses its adapter, those who want other adapters or none go on, and who is held waits for
those before it in the queue and for the answers of those who were admitted with one adapter. Knows
nothing of what adapters are, or of how they are read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import chain

from octavo.adapter import AdapterArrival, AdapterLoad
from octavo.errors import EngineError
from octavo.request import FinishReason, TokenOutput
from octavo.scheduler.ending import Ending, last_outputs
from octavo.scheduler.seating import Seating
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.sequence import Sequence


class AdapterSlots:
    """The slots of one queue and one set of seats; at first they hold the first adapters."""

    def __init__(
        self, num_slots: int, waiting: WaitingQueue, seating: Seating, ending: Ending
    ) -> None:
        self.num_loads = 0
        self.num_failed_loads = 0
        self.held_s = 0.0
        """Seconds that requests were held, of all together."""
        self._num_slots = num_slots
        self._waiting = waiting
        self._seating = seating
        self._ending = ending
        self._slots = {number: number for number in range(num_slots)}
        """By adapter, the one that was admitted with least recently first."""
        self._coming: dict[int, int] = {}
        """The same of adapters that are being read."""
        self._free: list[int] = []
        self._closed: set[int] = set()
        self._held_since: tuple[int, float] = (0, 0.0)
        """How many were held when it was last looked, and when that was."""
        self._open()

    @property
    def num_resident(self) -> int:
        """Adapters in memory."""
        return len(self._slots)

    @property
    def is_waited_for(self) -> bool:
        """Whether nothing can be computed before an adapter has come."""
        return bool(self._coming) and not any(self._seating) and self._waiting.head is None

    def plan(self, now_s: float) -> tuple[AdapterLoad, ...]:
        """Return the adapters that are to be read now, and close those that are to make room."""
        num_held = self._waiting.num_held
        num_before, before_s = self._held_since
        self.held_s += num_before * (now_s - before_s)
        self._held_since = num_held, now_s
        if not num_held and not self._closed:
            return ()
        loads: list[AdapterLoad] = []
        kept: set[int] = set()
        closed: set[int] = set()
        in_use, wanted = self._in_use(), self._waiting.wanted_adapters()
        for number in wanted:
            if number in self._coming or number in closed:
                continue
            if number in self._slots:
                kept.add(number)
                continue
            slot = self._take_slot(in_use.union(wanted), in_use | kept)
            if slot is not None:
                self._coming[number] = slot
                loads.append(AdapterLoad(number, slot))
            elif (victim := self._first_not_in(kept | closed)) is not None:
                closed.add(victim)
        self._closed = closed
        self._open()
        return tuple(loads)

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence that is admitted the slot of its adapter, if it has one."""
        if sequence.adapter is not None and not sequence.num_preemptions:
            number = sequence.adapter.number
            sequence.lora_slot = self._slots[number] = self._slots.pop(number)

    def arrive(self, arrivals: Iterable[AdapterArrival], now_s: float) -> list[TokenOutput]:
        """Let those in whose adapters have come; return last outputs of those whose have not.

        An adapter that could not be read is read again when the next request wants it.
        """
        outputs: list[TokenOutput] = []
        for number, error in arrivals:
            slot = self._coming.pop(number)
            if error is None:
                self._slots[number] = slot
                self.num_loads += 1
                continue
            self._free.append(slot)
            self.num_failed_loads += 1
            ended = self._waiting.new_with(number)
            for sequence in ended:
                self._ending.end(sequence, FinishReason.ERROR)
            outputs += last_outputs(ended, now_s, error)
        self._open()
        return outputs

    def check_integrity(self) -> None:
        """Raise EngineError if a slot is lost or doubled, or is not where its sequences know."""
        slots = [*self._slots.values(), *self._coming.values(), *self._free]
        if sorted(slots) != list(range(self._num_slots)):
            raise EngineError(f"adapters have slots {slots} but there are {self._num_slots}")
        returned = (each for each in self._waiting if each.num_preemptions)
        for sequence in chain(self._seating, returned):
            if sequence.adapter is None:
                continue
            slot = self._slots.get(sequence.adapter.number)
            if slot is None or slot != sequence.lora_slot:
                raise EngineError(f"{sequence} has slot {sequence.lora_slot}, its adapter {slot}")

    def _in_use(self) -> set[int]:
        """Return the adapters of those who were admitted and have not ended."""
        seated = {each.adapter.number for each in self._seating if each.adapter is not None}
        return seated | self._waiting.returned_adapters()

    def _take_slot(self, *busy: Container[int]) -> int | None:
        """Return a slot that is free, or that of an adapter not in `busy`; None if there is none.

        If that leaves no adapter, the next `busy` says which may not be taken.
        """
        if self._free:
            return self._free.pop()
        idle = next((each for each in map(self._first_not_in, busy) if each is not None), None)
        return None if idle is None else self._slots.pop(idle)

    def _first_not_in(self, others: Container[int]) -> int | None:
        return next((each for each in self._slots if each not in others), None)

    def _open(self) -> None:
        self._waiting.open_to(self._slots.keys() - self._closed)
