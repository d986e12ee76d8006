"""The thread that writes metrics: at once when something has changed, then not again for a while.

It also writes now and then when nothing has. Every write is a round trip to the server, so nobody
else makes any. Knows nothing of what is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

WRITE_INTERVAL_S = 0.1
#: Longest time without a write.
IDLE_INTERVAL_S = 1.0
#: Pause after a write that failed, which may fail again and be logged again.
FAILURE_PAUSE_S = 5.0
#: What the last writes may take before the thread is left behind, for a server that hangs.
CLOSE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class MetricsThread:
    """Calls `write` after a `wake`, at most every `WRITE_INTERVAL_S`, and once more at the end.

    Without a `wake` it calls it every `IDLE_INTERVAL_S`.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._has_changes = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def wake(self) -> None:
        """Have the changes until now written; any thread may call it, and none waits."""
        # To set it again would take a lock, for each token.
        if not self._has_changes.is_set():
            self._has_changes.set()

    def close(self) -> None:
        """Write the last changes and end."""
        self._is_closing.set()
        self._has_changes.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the last metrics could not be written within %g s", CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._has_changes.wait(IDLE_INTERVAL_S)
            self._has_changes.clear()
            self._is_closing.wait(WRITE_INTERVAL_S if self._try_to_write() else FAILURE_PAUSE_S)
        self._try_to_write()

    def _try_to_write(self) -> bool:
        try:
            self._write()
        except Exception:
            logger.exception("metrics could not be written; they are kept for the next time")
            self._has_changes.set()
            return False
        return True
