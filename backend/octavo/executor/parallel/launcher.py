"""What rank zero needs of whoever starts the other ranks, wherever these run."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from octavo.executor.parallel.rank_messages import Assignment


class RankProcess(Protocol):
    """A started rank, and rank zero's end of the connection to it."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def pid(self) -> int:
        """Id of its process, on its machine."""

    @property
    def connection(self) -> Connection:
        """Where it says what `rank_messages` lists; at its end when the process is gone."""

    def describe_end(self) -> str:
        """Say how it ended, in words that follow its name; call when the connection is at its end.

        Takes a few seconds at most.
        """


class Launcher(Protocol):
    """Starts ranks once, and tells them of steps. They never outlive the thread that made it."""

    @property
    def host(self) -> str:
        """Address of rank zero's machine as the other ranks reach it."""

    @property
    def own_device(self) -> str | None:
        """What rank zero computes on, where that is chosen with the places of started ranks."""

    def start(self, assignments: Sequence[Assignment]) -> Sequence[RankProcess]:
        """Start a rank for each assignment, in order, and send it.

        Raises:
            ConfigError, EngineError: a rank cannot be started; nothing that was is forgotten.
        """

    def send_step(self, message: bytes, timeout_s: float) -> None:
        """Tell all ranks of a step, in order; an empty message ends a series of them.

        Raises:
            EngineError: a rank takes nothing for `timeout_s`, or is gone.
        """

    def end(self, timeout_s: float) -> None:
        """Give the ranks `timeout_s` to end by themselves, and make them end."""


class StepReader(Protocol):
    """A rank's end of the way on which it hears of steps."""

    def receive(self) -> bytes:
        """Wait for the next message and return it."""
