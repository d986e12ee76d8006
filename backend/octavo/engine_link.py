"""A started engine, the thread that writes to it, and how long it has said nothing.

The engine reads between steps only, so a long prompt may have to wait for it; the thread that
answers every other request must not. Knows nothing of requests or restarts.
"""

from __future__ import annotations

import queue
import threading
import time
from multiprocessing.connection import Connection

from octavo.engine_host import EngineHost
from octavo.engine_messages import Shutdown

#: A wait counts as silence of this length at most: one that took longer says that this process was
#: stopped too, or had no processor.
_LONGEST_WAIT_S = 1.0


class EngineLink:
    """A host and the thread that writes to it."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.silent_s = 0.0
        """For how long it was waited for, since it said something last; any thread may read it."""
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message."""
        self._messages.put(message)

    def heard(self) -> None:
        """Take note that it said something, or that nothing is expected of it."""
        self.silent_s = 0.0

    def waited(self, seconds: float) -> None:
        """Take note of a wait in vain; one of many minutes counts as a second."""
        self.silent_s += min(seconds, _LONGEST_WAIT_S)

    def close(self, timeout_s: float) -> None:
        """Ask the engine to end after what was sent before, and force it after `timeout_s`."""
        self.send(Shutdown())
        deadline = time.monotonic() + timeout_s
        _drain(self.host.connection, deadline)
        self.release(max(0.0, deadline - time.monotonic()))

    def release(self, timeout_s: float) -> None:
        """Wait for the engine to end by itself, then by force, and free what it holds here."""
        self.host.stop(timeout_s)
        self.send(Shutdown())
        # A stuck engine thread never reads again: then the writer is left behind like it.
        self._writer.join(1.0)
        self.host.connection.close()

    def _write(self) -> None:
        message: object = None
        while not isinstance(message, Shutdown):
            message = self._messages.get()
            try:
                self.host.connection.send(message)
            except OSError:
                return  # `poll` learns of it too, and tells the owner


def _drain(connection: Connection, deadline: float) -> None:
    """Discard what the engine still says until it closes, so that it never waits to be read."""
    try:
        while (remaining_s := deadline - time.monotonic()) > 0.0 and connection.poll(remaining_s):
            connection.recv()
    except (EOFError, OSError):
        return
