"""`Workers`: the ranks beside rank zero as it sees them: asked, told, explained, ended.

Knows nothing of models or steps, nor of where ranks run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.executor.parallel.launcher import Launcher, RankProcess
from octavo.executor.parallel.rank_messages import Assignment, RankFailed

#: Of several ranks that fail, all but one only notice that another is gone; that one may be heard
#: of a little later. A share of what ranks wait for each other, and no more than so long.
_EXPLAIN_SHARE, _EXPLAIN_S = 1 / 6, 1.0
_END_TIMEOUT_S = 2.0

M = TypeVar("M")

logger = logging.getLogger(__name__)


class Workers:
    """Ranks that a launcher starts, which never outlive the thread that made it.

    Args:
        launcher: of nothing so far; ended with these.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.host = launcher.host
        """Address of rank zero's machine as they reach it."""
        self._launcher = launcher
        self._workers: Sequence[RankProcess] = ()
        self._explain_s = _EXPLAIN_S

    def start(self, assignments: Sequence[Assignment]) -> None:
        """Start a rank for each assignment, all of one size of world.

        Raises:
            ConfigError, EngineError: one cannot be started.
        """
        shortest_s = min(assignment.timeout_s for assignment in assignments)
        self._explain_s = min(_EXPLAIN_S, _EXPLAIN_SHARE * shortest_s)
        self._workers = self._launcher.start(assignments)

    @property
    def own_device(self) -> str | None:
        """See Launcher."""
        return self._launcher.own_device

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes, in order of rank, each on its machine."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def names(self) -> tuple[str, ...]:
        """What messages call them, in order of rank."""
        return tuple(worker.name for worker in self._workers)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Where the processes speak, in order of rank."""
        return tuple(worker.connection for worker in self._workers)

    def check(self) -> None:
        """Raise EngineError if a worker, of which nothing is expected, cannot go on."""
        if wait(self.connections, 0.0):
            raise self.explain("a rank ends")

    def hear(self, kind: type[M], timeout_s: float) -> list[tuple[str, M]]:
        """Wait for a message of every worker; return it with its name, in order of rank.

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
                message = _receive(worker)
                assert isinstance(message, kind), f"a worker says {message} too early"
                heard[worker.connection] = message
        return [(worker.name, heard[worker.connection]) for worker in self._workers]

    def tell(self, message: object) -> None:
        """Send a message to every worker; one that is gone is noticed when it is heard next."""
        for worker in self._workers:
            try:
                worker.connection.send(message)
            except OSError:
                logger.warning("%s is gone", worker.name)

    def tell_step(self, message: bytes, timeout_s: float) -> None:
        """Tell all workers of a step, or by an empty message of the end of a series.

        Raises:
            EngineError: one takes nothing for `timeout_s`, or is gone.
        """
        self._launcher.send_step(message, timeout_s)

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
                    return EngineError(f"{worker.name} {worker.describe_end()}")
                if not failure.lost_another:
                    return EngineError(f"{worker.name} failed: {failure.message}")
        return EngineError(f"no answer from {_names(silent)}: {noticed}" if silent else noticed)

    def end(self) -> None:
        """Wait for the ranks to end, and make them end."""
        self._launcher.end(_END_TIMEOUT_S)
        self._workers = ()


def _names(workers: Sequence[RankProcess]) -> str:
    return " and ".join(worker.name for worker in workers)


def _receive(worker: RankProcess) -> Any:
    try:
        message = worker.connection.recv()
    except (EOFError, OSError):
        raise EngineError(f"{worker.name} {worker.describe_end()} while it loaded") from None
    if not isinstance(message, RankFailed):
        return message
    text = f"{worker.name} failed to load: {message.message}"
    error: OctavoError = ConfigError(text) if message.is_config else EngineError(text)
    raise error


def _failure_of(worker: RankProcess) -> RankFailed | None:
    """Return what a worker says last, if it does before it is gone."""
    try:
        message = worker.connection.recv()
    except (EOFError, OSError):
        return None
    return message if isinstance(message, RankFailed) else None
