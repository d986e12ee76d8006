"""Finds out that Triton unloads a model or stops, of which it tells the model late or never.

It does so when all requests have ended and all gRPC streams that carried one are closed. Until then
it says of the model, or of itself, that it is not ready, and that can be asked. Knows nothing of
what is done about it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

INTERVAL_S = 0.5
#: Triton is asked every so many intervals while nothing is live and all that an unload may have to
#: give back is an engine.
IDLE_INTERVALS = 20
#: What a last answer gets before the thread is left behind, for a server that hangs.
STOP_TIMEOUT_S = 1.0
#: Refusals in a row that an unload takes. One alone may be Triton (26.03 and later) repeating what
#: the model said of itself a moment ago.
_ENOUGH = 2
#: What Triton raises while it stops. It must not be asked again: 24.10 reads such an error out of
#: memory that it has freed, which now and then crashes it or the stub.
_SERVER_STOPS = "Server not ready"

logger = logging.getLogger(__name__)


class UnloadWatch:
    """A thread that asks now and then, until it has seen an unload or is stopped.

    Args:
        is_model_ready: asks Triton whether it takes requests for the model; a round trip.
        is_serving: whether the model would serve them; Triton is not asked while it would not.
        is_busy: whether requests are live; then Triton is asked often.
        on_unload: called once, by the thread.
    """

    def __init__(
        self,
        is_model_ready: Callable[[], bool],
        is_serving: Callable[[], bool],
        is_busy: Callable[[], bool],
        on_unload: Callable[[], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._is_model_ready = is_model_ready
        self._is_serving = is_serving
        self._is_busy = is_busy
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
        num_refusals = num_idle = 0
        while num_refusals < _ENOUGH:
            if self._is_stopped.wait(self._interval_s):
                return
            is_due = num_refusals or self._is_busy() or num_idle == IDLE_INTERVALS
            num_idle = 0 if is_due else num_idle + 1
            if is_due:
                refusals = self._ask() if self._is_serving() else 0
                num_refusals = num_refusals + refusals if refusals else 0
        self._on_unload()

    def _ask(self) -> int:
        """Return 0 if Triton takes requests for the model, else how many refusals that counts."""
        try:
            return 0 if self._is_model_ready() else 1
        except Exception as error:
            if _SERVER_STOPS in str(error):
                return _ENOUGH
            logger.exception("Triton did not say whether the model is ready")
            return 0
