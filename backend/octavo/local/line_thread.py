"""Writes lines by a thread of its own, so that whoever is to read them holds up nothing.

A server must be watched, healed and stopped even if its launcher's output goes to a full disk, or
into a pipe that nobody reads or that is closed. Knows nothing of servers.
"""

from __future__ import annotations

import io
import logging
from typing import TextIO

from rich.console import Console

from octavo.process_log import LineStream, QueueHandler


class LineThread:
    """Takes lines and writes them to a stream later; what cannot be written is lost.

    Of lines that come much faster than they are read some are lost too, and a line says how many.
    """

    def __init__(self, stream: LineStream) -> None:
        self._handler = QueueHandler(stream)

    def put(self, line: str) -> None:
        """Take a line, without its end, and return at once."""
        self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._handler.close()


class ConsoleStream:
    """Lets a console show what is written, above whatever moves at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        """Show a line with its end."""
        self._console.print(text.removesuffix("\n"))

    def flush(self) -> None:
        """Do nothing: a console shows lines at once."""


class ErrorConsole(Console):
    """A console that outlives whoever reads it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=unbuffered(stream), highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Show nothing more, rather than end the program."""
        self.quiet = True


def unbuffered(stream: TextIO) -> TextIO:
    """Return another stream to the same file, which holds no lock that the end would wait for."""
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", write_through=True)
