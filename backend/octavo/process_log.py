"""Sets up the log of one of our processes: lines of text or JSON, written by a thread of its own.

Whoever logs a line only puts it into a bounded queue, so nothing waits for a slow reader of
standard error. What exceptions say is written only where it cannot quote a client's request. Knows
nothing of what is logged.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import sys
import threading
import traceback
from datetime import UTC, datetime
from typing import Any, Protocol

from octavo.errors import OctavoError, RequestError

#: Lines that wait to be written; more are counted and lost.
MAX_WAITING_LINES = 10_000
#: What the last lines get to be written when the process ends.
CLOSE_TIMEOUT_S = 1.0
_MAX_CHAIN = 8
# Kinds whose texts name types, places and devices. A KeyError, a TypeError or a ValueError quotes
# values, and so does a RequestError.
_HARMLESS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, IndexError),
    *(MemoryError, OctavoError, OSError, RuntimeError),
)
# What the server's own functions raise in a stub.
_SERVER_MODULE = "c_python_backend_utils"

logger = logging.getLogger(__name__)


class LineStream(Protocol):
    """Where lines are written to."""

    def write(self, text: str, /) -> object:
        """Write a line with its end."""

    def flush(self) -> object:
        """Let it be seen now."""


def set_up_logging(log_format: str, process: str, stream: LineStream | None = None) -> None:
    """Write the log to `stream`, by default standard error, from level INFO on.

    With `json` what other code writes to `sys.stderr` becomes lines of the log too. Does nothing in
    a process whose log is set up already.

    Args:
        log_format: `text` or `json`.
        process: the part that this process plays; every JSON line has it.
        stream: where the lines go.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = QueueHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = lambda *failure: logger.critical("the process failed", exc_info=failure)
    threading.excepthook = _log_failed_thread
    if log_format == "json":
        sys.stderr = _LoggedStream()


def without_text(error: BaseException) -> str:
    """Return the traceback of `error` and its causes, with only such texts as are harmless.

    Source lines are shown, values are not.
    """
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MAX_CHAIN:
        frames = "".join(traceback.format_tb(cause.__traceback__))
        name = type(cause).__name__
        parts.append(f"{frames}{name}: {_text_of(cause)}")
        hidden = cause.__suppress_context__
        cause = cause.__cause__ or (None if hidden else cause.__context__)
    return "\ncaused by\n".join(parts)


def _text_of(error: BaseException) -> str:
    of_server = type(error).__module__ == _SERVER_MODULE
    if of_server or (isinstance(error, _HARMLESS) and not isinstance(error, RequestError)):
        return str(error)
    return "(not shown, for it may quote a request)"


class TextFormatter(logging.Formatter):
    """Time, level and message; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%H:%M:%S")

    def formatException(self, ei: Any) -> str:
        """Return the traceback, without texts that may quote a request."""
        return without_text(ei[1])


class JsonFormatter(logging.Formatter):
    """One JSON object a line; the fields are listed in docs/observability.md."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, with the `fields` it was logged with."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = without_text(record.exc_info[1])
        return json.dumps(line | getattr(record, "fields", {}))


class QueueHandler(logging.Handler):
    """Hands records to a thread that formats and writes them; whoever logs does not wait for it.

    Of more than `max_waiting` records that are not written yet the rest is lost, and counted.
    """

    def __init__(self, stream: LineStream, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._max_waiting = max_waiting
        self._num_lost = 0
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as lost."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what waits, for a bounded time; `logging` calls it when the process ends."""
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        super().close()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._write(record)
            if self._num_lost and self._records.qsize() < self._max_waiting // 2:
                self._write(self._notice_of_loss())

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads the log any more
        except Exception:
            self.handleError(record)

    def _notice_of_loss(self) -> logging.LogRecord:
        with contextlib.ExitStack() as stack:
            if self.lock is not None:
                stack.enter_context(self.lock)
            num_lost, self._num_lost = self._num_lost, 0
        text = "%d lines of the log are lost, for they came faster than they were read"
        return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_lost,), None)


class _LoggedStream(io.TextIOBase):
    """Stands for standard error: every line written to it becomes a line of the log."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        """Log the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            logger.info("%s", line)
        return len(text)


def _log_failed_thread(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread is not None else "unknown"
    logger.error("thread %s failed", name, exc_info=failed.exc_value)
