"""The owner's end of an engine: starts it, feeds it, hears it, and starts it again when it dies.

One thread owns a client and calls everything; other threads may only call `wake` and read `state`
and `info`. Knows nothing of the server, text, or who waits for the tokens.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from octavo.engine_host import EngineHost
from octavo.engine_messages import (
    Abort,
    EngineFailed,
    EngineReady,
    Inspect,
    Inspected,
    Shutdown,
    StopRequested,
)
from octavo.errors import ConfigError, EngineDead
from octavo.request import EngineInfo, FinishReason, Request, StepOutput

#: Starts after an engine died, before the client gives up.
MAX_RESTARTS = 5
#: Pause before the first restart; each further one doubles it.
RESTART_DELAY_S = 0.5
#: An engine that has been ready this long counts as sound: its death starts a new count.
SOUND_AFTER_S = 60.0
_MAX_EVENTS = 256

logger = logging.getLogger(__name__)


class EngineState(enum.StrEnum):
    """Where an engine stands, as its owner sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine is gone, and with it every request it had; `message` is for their clients."""

    message: str


Event = StepOutput | Inspected | EngineReady | StopRequested | EngineDied


class EngineClient:
    """One engine, kept alive.

    Args:
        start_host: starts an engine and returns at once; called again after each death.
    """

    def __init__(self, start_host: Callable[[], EngineHost]) -> None:
        self._start_host = start_host
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._failure: str | None = None
        self._is_stopping = False
        self._num_restarts = 0
        self._restart_at = 0.0
        self._ready_since = 0.0
        self._wake_lock = threading.Lock()
        self._engine: _RunningEngine | None = _RunningEngine(start_host())

    @property
    def state(self) -> EngineState:
        """Where the engine stands; may be read from any thread."""
        return self._state

    @property
    def info(self) -> EngineInfo:
        """What the engine that was ready last said; may be read from any thread."""
        assert self._info is not None, "wait_ready has not returned"
        return self._info

    def wait_ready(self) -> EngineInfo:
        """Block until the first engine is ready.

        Raises:
            ConfigError: it did not start; the message says why.
        """
        while self._state is EngineState.STARTING:
            self.poll(None)
        if self._state is not EngineState.READY:
            raise ConfigError(self._failure or "the engine was closed before it was ready")
        return self.info

    def submit(self, request: Request | Inspect) -> None:
        """Send a request to the engine without waiting for it.

        Raises:
            EngineDead: there is no engine to take it.
        """
        if self._state is not EngineState.READY or self._engine is None:
            reason = f" after: {self._failure}" if self._failure else ""
            raise EngineDead(f"the engine is {self._state}{reason}; send the request again later")
        self._engine.send(request)

    def abort(self, request_id: str, reason: FinishReason, index: int | None = None) -> None:
        """Tell the engine to end a request, or only one of its answers.

        Harmless when it has ended or the engine is gone.
        """
        if self._engine is not None:
            self._engine.send(Abort(request_id, reason, index))

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for the engine, a `wake` or the timeout, and return what has happened since.

        Restarts a dead engine when its time has come, so it must be called again and again.
        """
        if self._engine is None and self._state is EngineState.RESTARTING:
            remaining_s = self._restart_at - time.monotonic()
            if remaining_s <= 0.0:
                return self._restart()
            timeout_s = remaining_s if timeout_s is None else min(timeout_s, remaining_s)
        sources: list[Connection | int] = [self._wakeup]
        if self._engine is not None:
            sources.append(self._engine.host.connection)
        ready = wait(sources, timeout_s)
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        if self._engine is None or self._engine.host.connection not in ready:
            return []
        return self._receive(self._engine)

    def wake(self) -> None:
        """Make a running or the next `poll` return at once; may be called from any thread."""
        with self._wake_lock:
            if self._state is not EngineState.CLOSED:
                os.eventfd_write(self._wakeup, 1)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the engine after its current step, or by force after `timeout_s`."""
        with self._wake_lock:
            if self._state is EngineState.CLOSED:
                return
            self._state = EngineState.CLOSED
            os.close(self._wakeup)
        if self._engine is not None:
            self._engine.close(timeout_s)
            self._engine = None

    def _receive(self, engine: _RunningEngine) -> list[Event]:
        events: list[Event] = []
        connection = engine.host.connection
        try:
            while len(events) < _MAX_EVENTS:
                message = connection.recv()
                if isinstance(message, EngineFailed):
                    self._failure = message.message
                else:
                    events.append(message)
                if isinstance(message, EngineReady):
                    self._become_ready(message.info)
                self._is_stopping |= isinstance(message, StopRequested)
                if not connection.poll():
                    break
        except (EOFError, OSError):
            reason = self._failure or engine.host.describe_end()
            engine.release(0.0)
            self._engine = None
            events.append(self._plan_restart(reason))
        return events

    def _become_ready(self, info: EngineInfo) -> None:
        self._info, self._failure = info, None
        self._ready_since = time.monotonic()
        self._state = EngineState.READY

    def _restart(self) -> list[Event]:
        try:
            self._engine = _RunningEngine(self._start_host())
        except (OSError, ConfigError) as error:
            return [self._plan_restart(str(error))]
        return []

    def _plan_restart(self, reason: str) -> EngineDied:
        """Take note that there is no engine now, and decide whether there will be one again."""
        self._failure = reason
        if self._state is EngineState.STARTING:
            self._state = EngineState.FAILED
            return EngineDied(reason)
        if self._is_stopping:
            self._state = EngineState.FAILED
            logger.error("%s; it is not started again, for the server stops", reason)
            return EngineDied(f"{reason} while the server stops")
        now = time.monotonic()
        if self._state is EngineState.READY and now - self._ready_since > SOUND_AFTER_S:
            self._num_restarts = 0
        if self._num_restarts == MAX_RESTARTS:
            self._state = EngineState.FAILED
            logger.error("%s; gave up after %d restarts", reason, MAX_RESTARTS)
            return EngineDied(f"{reason}; it is not started again, reload the model")
        delay_s = RESTART_DELAY_S * 2**self._num_restarts
        self._num_restarts += 1
        self._restart_at = now + delay_s
        self._state = EngineState.RESTARTING
        logger.error("%s; it is started again in %.1f s", reason, delay_s)
        return EngineDied(f"{reason}; it is being started again, send the request again later")


class _RunningEngine:
    """A host and the thread that writes to it.

    The engine reads between steps only, so a long prompt may have to wait for it; the thread that
    answers every other request must not.
    """

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message."""
        self._messages.put(message)

    def close(self, timeout_s: float) -> None:
        """Ask the engine to end after what was sent before, and force it after `timeout_s`."""
        self.send(Shutdown())
        deadline = time.monotonic() + timeout_s
        _drain(self.host.connection, deadline)
        self.release(max(0.0, deadline - time.monotonic()))

    def release(self, timeout_s: float) -> None:
        """Wait for the engine to end by itself, then by force, and free what it holds here."""
        self.host.stop(timeout_s)
        self.send(Shutdown())
        # A stuck engine thread never reads again: then the writer is left behind like it.
        self._writer.join(1.0)
        self.host.connection.close()

    def _write(self) -> None:
        message: object = None
        while not isinstance(message, Shutdown):
            message = self._messages.get()
            try:
                self.host.connection.send(message)
            except OSError:
                return  # `poll` learns of it too, and tells the owner


def _drain(connection: Connection, deadline: float) -> None:
    """Discard what the engine still says until it closes, so that it never waits to be read."""
    try:
        while (remaining_s := deadline - time.monotonic()) > 0.0 and connection.poll(remaining_s):
            connection.recv()
    except (EOFError, OSError):
        return
