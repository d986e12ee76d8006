"""Reads adapters into their slots on a thread of its own, so that no step waits for a disk.

Knows nothing of sequences, of why an adapter is read, or of other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from octavo.adapter import AdapterArrival, AdapterLoad
from octavo.errors import EngineError, OctavoError

ReadAdapter = Callable[[AdapterLoad], None]
"""Reads one adapter into its slot, or raises."""

logger = logging.getLogger(__name__)


class AdapterLoads:
    """Loads of one device, one after the other in the order of their start.

    Args:
        read: called on the thread, which starts with the first load.
        tell: called there with what has become of each.
    """

    def __init__(self, read: ReadAdapter, tell: Callable[[AdapterArrival], None]) -> None:
        self._read = read
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "adapter-reader")

    def start(self, loads: Iterable[AdapterLoad]) -> None:
        """Begin to read adapters into slots that no step uses that is not done yet."""
        for load in loads:
            self._thread.submit(self._load, load)

    def _load(self, load: AdapterLoad) -> None:
        error: OctavoError | None = None
        try:
            self._read(load)
        except OctavoError as known:
            error = known
        except Exception:
            logger.exception("an adapter could not be read")
            error = EngineError("the adapter could not be read; the engine's log says why")
        self._tell(AdapterArrival(load.number, error))


class ArrivedAdapters:
    """What has become of loads and has not been asked for; any thread may put."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[AdapterArrival] = SimpleQueue()
        self.put = self._queue.put

    def pop(self, timeout_s: float = 0.0) -> tuple[AdapterArrival, ...]:
        """Return what there is, or wait for one up to `timeout_s`."""
        arrivals: list[AdapterArrival] = []
        while True:
            try:
                arrivals.append(self._queue.get(not arrivals and timeout_s > 0.0, timeout_s))
            except Empty:
                return tuple(arrivals)
