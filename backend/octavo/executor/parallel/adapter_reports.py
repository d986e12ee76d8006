"""What ranks tell rank zero of the adapters that they have read, through the store that they share.

All ranks are told of the same loads in the same order, so a load is known by its number. Knows
nothing of how adapters are read.
"""

from __future__ import annotations

import time
from collections import deque

from torch.distributed.distributed_c10d import Store

from octavo.adapter import AdapterArrival
from octavo.errors import EngineError
from octavo.executor.adapter_loads import ArrivedAdapters

_READ = "read"
#: How often rank zero looks whether another rank has read an adapter that it waits for.
_LOOK_EVERY_S = 1e-3


class AdapterReporter:
    """The end of a rank other than zero."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._num_loads = 0

    def tell(self, arrival: AdapterArrival) -> None:
        """Say what has become of the next load."""
        report = _READ if arrival.error is None else str(arrival.error)
        self._store.set(_key(self._num_loads, self._rank), report)
        self._num_loads += 1


class AdapterReports:
    """Rank zero's end: an adapter has come when all ranks have it.

    Args:
        store: of all ranks.
        num_ranks: itself included.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self.own = ArrivedAdapters()
        """What rank zero itself has read."""
        self._store = store
        self._others = range(1, num_ranks)
        self._num_loads = 0
        self._pending: deque[AdapterArrival] = deque()
        """Those of which some other rank has not told yet."""

    def pop(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        """Return what has become of loads; wait for one up to `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        self._pending += self.own.pop(timeout_s)
        arrived: list[AdapterArrival] = []
        while self._pending:
            keys = [_key(self._num_loads, rank) for rank in self._others]
            if self._store.check(keys):
                arrived.append(self._join(self._pending.popleft(), keys))
                self._num_loads += 1
            elif arrived or time.monotonic() >= until_s:
                break
            else:
                time.sleep(_LOOK_EVERY_S)
        return tuple(arrived)

    def _join(self, own: AdapterArrival, keys: list[str]) -> AdapterArrival:
        """Return what has become of a load on all ranks."""
        reports = [self._store.get(key).decode() for key in keys]
        for key in keys:
            self._store.delete_key(key)
        faults = [report for report in reports if report != _READ]
        if own.error is not None or not faults:
            return own
        return AdapterArrival(own.number, EngineError(faults[0]))


def _key(load: int, rank: int) -> str:
    return f"adapter-{load}-{rank}"
