"""Speaks with a Ray cluster: `python -m octavo.executor.parallel.ray_driver --fd N`.

Ray's client keeps threads, handlers of signals and a connection of which there is one a process; it
may wait for minutes, and ends its process where the cluster is lost. So it is in a process of its
own, which never outlives the thread that started it, and whose end makes Ray end the ranks. Answers
one request at a time; see `ray_messages`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from octavo.errors import EngineError
from octavo.executor.parallel.ray_messages import (
    Answer,
    DriverFailed,
    Explain,
    Explained,
    Join,
    Joined,
    Request,
    Start,
)
from octavo.parent_process import die_with_parent

if TYPE_CHECKING:
    from octavo.executor.parallel.ray_cluster import RayCluster


class _Driver:
    """Does what it is asked."""

    def __init__(self) -> None:
        self._cluster: RayCluster | None = None

    def answer(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        except EngineError as error:
            return DriverFailed(str(error))
        except Exception as error:
            return DriverFailed(f"Ray failed: {type(error).__name__}: {error}")

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, Join):
            self._cluster = _join(request.address)
            return Joined(self._cluster.host)
        assert self._cluster is not None, f"{request} before a cluster is joined"
        if isinstance(request, Start):
            return self._cluster.start(request)
        assert isinstance(request, Explain), request
        return Explained(self._cluster.explain(request.rank, request.timeout_s))

    def leave(self) -> None:
        if self._cluster is not None:
            self._cluster.leave()


def _join(address: str) -> RayCluster:
    # Imported late: Ray takes a while, and by then this process must be tied to its parent.
    from octavo.executor.parallel.ray_cluster import RayCluster

    cluster = RayCluster(address)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray takes it
    return cluster


def main() -> int:
    """Serve the connection of `--fd` until its other end closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank zero alone decides when to end
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    parser = argparse.ArgumentParser(prog="python -m octavo.executor.parallel.ray_driver")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to rank zero")
    connection: Connection = Connection(parser.parse_args().fd)
    driver = _Driver()
    try:
        while True:
            connection.send(driver.answer(connection.recv()))
    except (EOFError, OSError):
        driver.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
