"""Reads from the log how far a starting server is, and whether it has stopped getting anywhere.

While a model loads, Triton's launcher asks its stub process for a sign of life once a second. One
that gets no processor time for that long is given up without a word: the launcher then waits for
the end of a process that goes on loading and never ends. No option changes that second. All that
shows is a model that says it is ready and a Triton that never says so. Knows nothing of processes.
"""

from __future__ import annotations

import re

from octavo.local.server_log import LogRecord

_LOADING = re.compile(r"^loading: (.+):-?\d+$")
_ENDED = re.compile(r"^(?:successfully loaded|failed to load) '([^']+)'")
_READY = re.compile(r"^model ready in ")


class StartupProgress:
    """What the log of one start has told so far."""

    def __init__(self) -> None:
        self._loading: set[str] = set()
        # Octavo's own lines name no model, so models that are ready are only counted.
        self._num_ready = 0
        self._ready_at_s = 0.0
        self.has_failed = False
        """Whether a model could not be loaded."""

    def observe(self, record: LogRecord, now_s: float) -> None:
        """Take in one line of the log, read at `now_s` (seconds of `time.monotonic`)."""
        self.has_failed |= record.is_failed_load
        if record.ours:
            if _READY.match(record.message):
                self._num_ready += 1
                self._ready_at_s = now_s
        elif match := _LOADING.match(record.message):
            self._loading.add(match[1])
        elif match := _ENDED.match(record.message):
            self._loading.discard(match[1])
            self._num_ready = max(0, self._num_ready - 1)

    def stalled_s(self, now_s: float) -> float:
        """Return for how many seconds Triton alone has kept the models waiting.

        That is 0.0 as long as one of them may still be loading.
        """
        if not self._loading or self._num_ready < len(self._loading):
            return 0.0
        return now_s - self._ready_at_s

    def describe(self) -> str:
        """Return in words what the start is waiting for."""
        if not self._loading:
            return "it is starting"
        names = ", ".join(sorted(self._loading))
        if self._num_ready < len(self._loading):
            return f"it is loading {names}"
        return f"{names} is ready, but Triton has not taken notice"
