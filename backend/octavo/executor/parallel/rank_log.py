"""Brings the log of a rank on another machine into the log of this process.

Knows nothing of what is logged.
"""

from __future__ import annotations

import json
import logging
from multiprocessing.connection import Connection
from typing import Any


class LogStream:
    """What a log is written to, line by line, in the form of `JsonFormatter`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> None:
        """Send a line; raises OSError where nobody reads any more."""
        self._connection.send_bytes(text.encode())

    def flush(self) -> None:
        """Do nothing: what is written is on its way."""


def relay_log(connection: Connection) -> None:
    """Log here what a rank writes to its stream, until it ends; takes a thread of its own."""
    with connection:
        while True:
            try:
                line = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            _log(**line)


def _log(logger: str, level: str, message: str, exception: str = "", **fields: Any) -> None:
    text = "\n".join(filter(None, (f"{fields['process']}: {message}", exception)))
    extra = {"fields": fields}  # its own time, process and pid
    logging.getLogger(logger).log(logging.getLevelName(level), "%s", text, extra=extra)
