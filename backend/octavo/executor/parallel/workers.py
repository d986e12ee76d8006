"""The processes of the other ranks, as rank zero sees them: started, asked, explained, ended.

Knows nothing of models or steps.
"""

from __future__ import annotations

import logging
import subprocess
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.executor.parallel.rank_messages import Assignment, RankFailed
from octavo.interpreter import find_interpreter, package_path
from octavo.model.shard import Shard
from octavo.process_end import describe_end

#: Of several ranks that fail, all but one only notice that another is gone; that one may be heard
#: of a little later. A share of what ranks wait for each other, and no more than so long.
_EXPLAIN_SHARE, _EXPLAIN_S = 1 / 6, 1.0
_END_TIMEOUT_S = 2.0
_MODULE = "octavo.executor.parallel.worker"

M = TypeVar("M")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A started process, and rank zero's end of the connection to it."""

    shard: Shard
    process: subprocess.Popen[bytes]
    connection: Connection


class Workers:
    """Processes that never outlive the thread that made them.

    Args:
        assignments: one for each, all of one size of world.
        ring_fd: descriptor of the control ring's memory.
    """

    def __init__(self, assignments: list[Assignment], ring_fd: int) -> None:
        self._workers: list[_Worker] = []
        shortest_s = min(assignment.timeout_s for assignment in assignments)
        self._explain_s = min(_EXPLAIN_S, _EXPLAIN_SHARE * shortest_s)
        # -P: a folder of the working directory must not hide an installed package.
        command = [str(find_interpreter()), "-P", "-m", _MODULE]
        for assignment in assignments:
            self._workers.append(_start(command, assignment, ring_fd))

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes, in order of rank."""
        return tuple(worker.process.pid for worker in self._workers)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Where the processes speak, in order of rank."""
        return tuple(worker.connection for worker in self._workers)

    def check(self) -> None:
        """Raise EngineError if a worker, of which nothing is expected, cannot go on."""
        if wait(self.connections, 0.0):
            raise self.explain("a rank ends")

    def hear(self, kind: type[M], timeout_s: float) -> list[tuple[Shard, M]]:
        """Wait for a message of every worker, in order of rank.

        Raises:
            ConfigError, EngineError: a rank cannot go on, is gone, or says nothing for `timeout_s`;
                the message names it.
        """
        heard: dict[Connection, M] = {}
        deadline_s = time.monotonic() + timeout_s
        while missing := [each for each in self._workers if each.connection not in heard]:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = wait([worker.connection for worker in missing], left_s)
            if not ready:
                names = _names(missing)
                raise EngineError(f"no answer from {names} for {timeout_s:.0f} s while it loaded")
            for worker in [each for each in missing if each.connection in ready]:
                message = self._receive(worker)
                assert isinstance(message, kind), f"a worker says {message} too early"
                heard[worker.connection] = message
        return [(worker.shard, heard[worker.connection]) for worker in self._workers]

    def tell(self, message: object) -> None:
        """Send a message to every worker; one that is gone is noticed when it is heard next."""
        for worker in self._workers:
            try:
                worker.connection.send(message)
            except OSError:
                logger.warning("%s is gone", worker.shard)

    def explain(self, noticed: str) -> EngineError:
        """Return why ranks do not get on: the one that failed by itself, and how, if one did.

        Args:
            noticed: what rank zero has noticed of it.
        """
        deadline_s = time.monotonic() + self._explain_s
        silent = list(self._workers)
        while silent and (left_s := deadline_s - time.monotonic()) > 0:
            ready = wait([worker.connection for worker in silent], left_s)
            for worker in [each for each in silent if each.connection in ready]:
                silent.remove(worker)
                failure = _failure_of(worker)
                if failure is None:
                    return EngineError(f"{worker.shard} {describe_end(worker.process)}")
                if not failure.lost_another:
                    return EngineError(f"{worker.shard} failed: {failure.message}")
        return EngineError(f"no answer from {_names(silent)}: {noticed}" if silent else noticed)

    def end(self) -> None:
        """Wait for the processes to end, and make them end."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.connection.close()
        self._workers.clear()

    def _receive(self, worker: _Worker) -> Any:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            end = describe_end(worker.process)
            raise EngineError(f"{worker.shard} {end} while it loaded") from None
        if not isinstance(message, RankFailed):
            return message
        text = f"{worker.shard} failed to load: {message.message}"
        error: OctavoError = ConfigError(text) if message.is_config else EngineError(text)
        raise error


def _names(workers: list[_Worker]) -> str:
    return " and ".join(str(worker.shard) for worker in workers)


def _failure_of(worker: _Worker) -> RankFailed | None:
    """Return what a worker says last, if it does before it is gone."""
    try:
        message = worker.connection.recv()
    except (EOFError, OSError):
        return None
    return message if isinstance(message, RankFailed) else None


def _start(command: list[str], assignment: Assignment, ring_fd: int) -> _Worker:
    config = assignment.config
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
    shard = Shard.of(assignment.rank, *sizes)
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno()), "--ring", str(ring_fd)],
            pass_fds=[theirs.fileno(), ring_fd],
            stdin=subprocess.DEVNULL,
            env=package_path(),
        )
    logger.info("process %d of %s started", process.pid, shard)
    try:
        ours.send(assignment)
    except OSError:
        logger.warning("process %d of %s ended as soon as it started", process.pid, shard)
    return _Worker(shard, process, ours)
