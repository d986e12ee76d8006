"""`MpLauncher`: ranks as processes of this machine, told of steps through shared memory.

Knows nothing of models or of what ranks say.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from octavo.errors import EngineError
from octavo.executor.parallel.control import ControlWriter
from octavo.executor.parallel.rank_messages import Assignment
from octavo.interpreter import find_interpreter, package_path
from octavo.process_end import describe_end

HOST = "127.0.0.1"
_MODULE = "octavo.executor.parallel.worker"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Process:
    """See RankProcess."""

    name: str
    connection: Connection
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def describe_end(self) -> str:
        return describe_end(self.process)


class MpLauncher:
    """See Launcher.

    Args:
        num_ranks: with rank zero.
    """

    host = HOST
    own_device = None

    def __init__(self, num_ranks: int) -> None:
        self._ring = ControlWriter(num_ranks - 1)
        self._processes: list[_Process] = []

    def start(self, assignments: Sequence[Assignment]) -> Sequence[_Process]:
        """Start processes that inherit their ends of all connections; see Launcher."""
        # -P: a folder of the working directory must not hide an installed package.
        command = [str(find_interpreter()), "-P", "-m", _MODULE]
        for assignment in assignments:
            self._processes.append(_start(command, assignment, self._ring.fd))
        return tuple(self._processes)

    def send_step(self, message: bytes, timeout_s: float) -> None:
        """Write a message that all read; see Launcher."""
        self._ring.send(message, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Wait for the processes, then kill them; see Launcher."""
        with suppress(EngineError):  # who does not read is ended too
            self._ring.send(b"", 0.0)
        deadline_s = time.monotonic() + timeout_s
        for each in self._processes:
            try:
                each.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            each.connection.close()
        self._processes.clear()
        self._ring.close()


def _start(command: list[str], assignment: Assignment, ring_fd: int) -> _Process:
    name = str(assignment.shard)
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno()), "--ring", str(ring_fd)],
            pass_fds=[theirs.fileno(), ring_fd],
            stdin=subprocess.DEVNULL,
            env=package_path(),
        )
    logger.info("process %d of %s started", process.pid, name)
    try:
        ours.send(assignment)
    except OSError:
        logger.warning("process %d of %s ended as soon as it started", process.pid, name)
    return _Process(name, ours, process)
