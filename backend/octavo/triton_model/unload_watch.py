"""Finds out that Triton unloads a model or stops, of which it tells the model late or never.

It does so when all requests have ended and all gRPC streams that carried one are closed. Until then
it says of the model, or of itself, that it is not ready, and that can be asked. Knows nothing of
what is done about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_S = 0.5
#: What a last answer gets before the thread is left behind, for a server that hangs.
STOP_TIMEOUT_S = 1.0
#: Refusals in a row that an unload takes. One alone may be Triton (26.03 and later) repeating what
#: the model said of itself a moment ago.
_ENOUGH = 2


class UnloadWatch:
    """A thread that asks twice a second, until it has seen an unload or is stopped.

    Args:
        is_refusing: asks Triton whether it takes no requests for the model.
        is_serving: whether the model would serve them; Triton is not asked while it would not.
        on_unload: called once, by the thread.
    """

    def __init__(
        self,
        is_refusing: Callable[[], bool],
        is_serving: Callable[[], bool],
        on_unload: Callable[[], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._is_refusing = is_refusing
        self._is_serving = is_serving
        self._on_unload = on_unload
        self._interval_s = interval_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unload-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._is_stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        num_refusals = 0
        while num_refusals < _ENOUGH:
            if self._is_stopped.wait(self._interval_s):
                return
            is_refused = self._is_serving() and self._is_refusing()
            num_refusals = num_refusals + 1 if is_refused else 0
        self._on_unload()
