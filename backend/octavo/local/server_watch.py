"""Notices what ails a running Triton server and no part of it heals.

That is a stub process that ended, a model that does not answer any more, or an engine that died
too often. A server that ends is noticed by whoever started it. Knows nothing of what is done then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from octavo.local.stubs import dead_stubs

#: Returns in words why only a new server can help, or None; raises TimeoutError without an answer.
Probe = Callable[[], str | None]

CHECK_INTERVAL_S = 2.0
#: So many checks for dead stubs go to one question to the model.
CHECKS_A_PROBE = 5
#: Probes without an answer, one after the other, that a busy machine may cause.
MISSES_ALLOWED = 2


class ServerWatch:
    """A thread that looks at one server until it finds a fault or is stopped."""

    def __init__(
        self,
        server_pid: int,
        probe: Probe | None = None,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self.fault: str | None = None
        """What was found, for whoever asks now and then."""
        self._server_pid = server_pid
        self._probe = probe
        self._check_interval_s = check_interval_s
        self._suspects: set[int] = set()
        self._num_misses = 0
        self._is_stopped = threading.Event()
        threading.Thread(target=self._run, name="octavo-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more; does not wait for a probe under way."""
        self._is_stopped.set()

    def _run(self) -> None:
        num_checks = 0
        while self.fault is None and not self._is_stopped.wait(self._check_interval_s):
            num_checks += 1
            self.fault = self._find_dead_stub()
            if self.fault is None and num_checks % CHECKS_A_PROBE == 0:
                self.fault = self._ask_model()

    def _find_dead_stub(self) -> str | None:
        dead = dead_stubs(self._server_pid)
        # Triton may be about to collect one that is seen for the first time.
        lost, self._suspects = dead & self._suspects, dead
        if not lost:
            return None
        return (
            f"the model's stub process {min(lost)} ended by itself or was killed, and Triton "
            "does not replace it"
        )

    def _ask_model(self) -> str | None:
        if self._probe is None:
            return None
        try:
            fault = self._probe()
        except TimeoutError as error:
            self._num_misses += 1
            return str(error) if self._num_misses > MISSES_ALLOWED else None
        self._num_misses = 0
        return fault
