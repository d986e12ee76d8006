"""Keeps a local server running: one that ends or cannot serve any more is started again.

On the same ports, after a pause that doubles, and a bounded number of times in a row. Knows nothing
of terminals; the signals that ask to stop come in a queue.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable

from octavo.errors import ConfigError, LaunchError
from octavo.local.guardian import describe_exit
from octavo.local.server_watch import Probe, ServerWatch
from octavo.local.triton_server import TritonServer
from octavo.restart_policy import RestartPolicy

LOAD_TIMEOUT_S = 1800.0
POLL_INTERVAL_S = 0.2

Signals = queue.SimpleQueue[int]


class Supervisor:
    """Looks after one server that is ready.

    Args:
        signals: whatever is put there asks to stop; filled by signal handlers.
        say: takes a level of logging and a line for the user.
        probe: asks the server's model how it is.
    """

    def __init__(
        self,
        server: TritonServer,
        restarts: RestartPolicy,
        signals: Signals,
        say: Callable[[int, str], None],
        probe: Probe | None = None,
    ) -> None:
        self._server = server
        self._restarts = restarts
        self._signals = signals
        self._say = say
        self._probe = probe
        self._ready_since = time.monotonic()

    def run(self) -> None:
        """Return when a signal asks to stop; the server may be running then, or not.

        Raises:
            LaunchError: the server failed too often.
        """
        while (fault := self._watch()) is not None:
            if not self._heal(fault):
                return

    def _watch(self) -> str | None:
        """Return what ails the server, or None when a signal asks to stop."""
        watch = ServerWatch(self._server.pid, self._probe)
        try:
            while not self._is_asked_to_stop(POLL_INTERVAL_S):
                if (status := self._server.poll()) is not None:
                    return describe_exit(status)
                if watch.fault is not None:
                    return watch.fault
            return None
        finally:
            watch.stop()

    def _heal(self, fault: str) -> bool:
        """Start the server again until it is ready; return False if a signal asks to stop."""
        ready_for_s = time.monotonic() - self._ready_since
        while True:
            self._server.kill()
            delay_s = self._restarts.next_delay_s(ready_for_s)
            if delay_s is None:
                raise LaunchError(f"{fault}; {self._give_up()}")
            count = f"restart {self._restarts.num_restarts} of {self._restarts.max_restarts}"
            self._say(logging.ERROR, f"{fault}; the server is started again in {delay_s:g} s")
            if self._is_asked_to_stop(delay_s):
                return False
            self._say(logging.WARNING, f"starting the server again ({count})")
            try:
                if not self._start():
                    return False
            except (ConfigError, LaunchError) as error:
                fault, ready_for_s = str(error), 0.0
            else:
                return True

    def _start(self) -> bool:
        started = time.monotonic()
        self._server.restart()
        if not self._server.wait_ready(LOAD_TIMEOUT_S, lambda: not self._signals.empty()):
            return False
        self._ready_since = time.monotonic()
        self._say(logging.WARNING, f"ready again after {self._ready_since - started:.1f} s")
        return True

    def _give_up(self) -> str:
        left = "nothing of it is left running"
        count = self._restarts.max_restarts
        tries = "restart" if count == 1 else "restarts in a row"
        return f"gave up after {count} {tries}, {left}" if count else left

    def _is_asked_to_stop(self, timeout_s: float) -> bool:
        try:
            self._signals.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True
