"""The loop around an engine: requests in from a connection, one message out a step.

Runs as `python -m octavo.engine_process --fd N`, or in a thread of its owner's process. Knows
nothing of the server or of text; whoever holds the other end of the connection owns the requests.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from octavo.config import EngineConfig
from octavo.engine_messages import (
    Abort,
    EngineFailed,
    EngineReady,
    Inspect,
    Inspected,
    Shutdown,
    StopRequested,
)
from octavo.errors import OctavoError, QueueFull, RequestError
from octavo.inspection import Inspection
from octavo.parent_process import die_with_parent
from octavo.process_log import set_up_logging
from octavo.request import (
    EngineInfo,
    FinishReason,
    Request,
    StepOutput,
    StepStats,
    TokenOutput,
)

#: An engine that has been idle this long recounts its blocks, once.
IDLE_CHECK_DELAY_S = 1.0
#: So many pauses are the longest that an idle engine waits for more requests while some come.
MOST_PAUSES = 4

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the loop needs of an engine; see `octavo.engine.Engine`."""

    info: EngineInfo
    company_s: float
    """An idle engine begins when nobody has come for so many seconds, with all who have."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""

    @property
    def connections(self) -> tuple[Connection, ...]:
        """To processes that take part. One that can be read says that its process cannot go on."""

    def add(self, request: Request) -> None:
        """Queue a request, or raise RequestError or QueueFull."""

    def abort(
        self, request_id: str, reason: FinishReason, index: int | None
    ) -> tuple[TokenOutput, ...]:
        """End a request or one of its answers, and return the last outputs of what was live."""

    def step(self) -> StepOutput:
        """Run one step; an exception means that the engine cannot go on."""

    def stats(self) -> StepStats:
        """Return the figures as they are now."""

    def inspect(self) -> Inspection:
        """Return what queues and blocks look like now."""

    def check_processes(self) -> None:
        """Raise EngineError if a process that takes part is gone."""

    def check_integrity(self) -> None:
        """Recount every block or raise EngineError."""


EngineFactory = Callable[[EngineConfig], EngineLike]


class _OwnerGone(Exception):
    """The other end of the connection is closed."""


def load_engine(config: EngineConfig) -> EngineLike:
    """Load the engine of this package."""
    # Imported late: torch takes seconds, and by then this process must be tied to its owner.
    from octavo.engine_choice import load_chosen
    from octavo.local.demo_model import resolve_model

    return load_chosen(replace(config, model=resolve_model(config.model)))


def run_engine(
    config: EngineConfig,
    connection: Connection,
    engine_factory: EngineFactory = load_engine,
    stop_signals: list[int] | None = None,
) -> bool:
    """Serve one connection until its owner ends it or the engine fails.

    A failure is told to the owner as `EngineFailed`, and what a signal handler puts into
    `stop_signals` as `StopRequested`. Returns whether the end was in good order.
    """
    channel = _Channel(connection)
    engine = None
    try:
        engine = engine_factory(config)
        channel.send(EngineReady(engine.info))
        _Loop(engine, channel, [] if stop_signals is None else stop_signals).run()
    except _OwnerGone:
        logger.warning("the owner of the engine is gone; ending")
    except Exception as error:
        known = isinstance(error, OctavoError)
        what = error if known else type(error).__name__
        # What stops a load on purpose is for its owner to tell, once.
        level = logging.DEBUG if known and engine is None else logging.ERROR
        logger.log(level, "the engine ends: %s", what, exc_info=None if known else error)
        _report_failure(channel, _reason(error, is_serving=engine is not None))
        return False
    return True


def _reason(error: Exception, is_serving: bool) -> str:
    """Say why the engine ends: to the operator while it loads, to clients when it serves."""
    if isinstance(error, OctavoError):
        return str(error)
    kind = type(error).__name__
    # An unexpected error's text may show paths and internals, which are not for clients.
    return f"the engine failed ({kind}), its log says why" if is_serving else f"{kind}: {error}"


def _report_failure(channel: _Channel, message: str) -> None:
    try:
        channel.send(EngineFailed(message))
    except _OwnerGone:
        logger.warning("the owner of the engine is gone; nobody is told of the failure")


class _Channel:
    """A connection whose other end may close at any time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        # Blocks while the owner is behind by a socket buffer of steps: better than to run ahead.
        try:
            self._connection.send(message)
        except OSError as error:
            raise _OwnerGone from error

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise _OwnerGone from error

    def has_message(self, timeout_s: float = 0.0) -> bool:
        try:
            return self._connection.poll(timeout_s)
        except OSError as error:
            raise _OwnerGone from error

    def wait(self, others: tuple[Connection, ...], timeout_s: float | None) -> bool:
        """Wait for a message, here or at one of `others`; return whether there is one."""
        try:
            return bool(wait([self._connection, *others], timeout_s))
        except OSError as error:
            raise _OwnerGone from error


class _Loop:
    """Drain the inbox, step, tell; wait without a busy loop when there is nothing to do."""

    def __init__(self, engine: EngineLike, channel: _Channel, stop_signals: list[int]) -> None:
        self._engine = engine
        self._channel = channel
        self._stop_signals = stop_signals
        self._untold: list[TokenOutput] = []
        self._told = StepStats()

    def run(self) -> None:
        while True:
            pause_s = 0.0
            if not self._engine.has_unfinished:
                self._tell_idle()
                self._wait()
                pause_s = self._engine.company_s
            for message in self._messages(pause_s):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            if self._stop_signals:
                self._stop_signals.clear()
                self._channel.send(StopRequested())
            if self._untold:  # a step may take long, and a refusal need not wait for it
                self._tell(self._engine.stats())
            if self._engine.has_unfinished:
                step = self._engine.step()
                self._tell(step.stats, step.outputs)

    def _messages(self, pause_s: float) -> Iterator[Any]:
        """Yield what is there, and what comes until a pause, but not for long."""
        ends_s = time.monotonic() + MOST_PAUSES * pause_s
        while self._channel.has_message(pause_s if time.monotonic() < ends_s else 0.0):
            yield self._channel.receive()

    def _handle(self, message: Request | Abort | Inspect) -> None:
        if isinstance(message, Inspect):
            self._channel.send(Inspected(message.request_id, self._engine.inspect()))
            return
        if isinstance(message, Abort):
            ended = self._engine.abort(message.request_id, message.reason, message.index)
            self._untold += ended if message.reason is FinishReason.STOP else ()
            return
        try:
            self._engine.add(message)
        except (RequestError, QueueFull) as error:
            refusal = TokenOutput(message.request_id, (), (), FinishReason.ERROR, error)
            self._untold.append(refusal)

    def _tell(self, stats: StepStats, outputs: tuple[TokenOutput, ...] = ()) -> None:
        self._channel.send(StepOutput((*self._untold, *outputs), stats))
        self._untold, self._told = [], stats

    def _tell_idle(self) -> None:
        """Send what no step will: outputs that wait, and figures that an abort has changed."""
        stats = self._engine.stats()
        if self._untold or stats != self._told:
            self._tell(stats)

    def _wait(self) -> None:
        """Block until a message is there, or the owner or a process of the engine is gone."""
        connections = self._engine.connections
        if not self._channel.wait(connections, IDLE_CHECK_DELAY_S):
            self._engine.check_integrity()
            self._channel.wait(connections, None)
        self._engine.check_processes()


def tie_to_parent(stop_signals: list[int]) -> None:
    """Make the kernel kill this process when the thread that started it ends.

    Signals that reach the whole process group end nothing, for the owner alone decides when to end;
    SIGTERM is noted in `stop_signals`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    die_with_parent()


def main(engine_factory: EngineFactory = load_engine) -> int:
    """Serve the connection of `--fd`, whose first message is the configuration."""
    stop_signals: list[int] = []
    tie_to_parent(stop_signals)
    parser = argparse.ArgumentParser(prog="python -m octavo.engine_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the owner")
    connection: Connection = Connection(parser.parse_args().fd)
    try:
        config = connection.recv()
    except (EOFError, OSError):
        return 1  # the owner died before this process was tied to it
    set_up_logging(config.log_format, "engine")
    return 0 if run_engine(config, connection, engine_factory, stop_signals) else 1


if __name__ == "__main__":
    sys.exit(main())
