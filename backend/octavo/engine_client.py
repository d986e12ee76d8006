"""The owner's end of an engine: starts it, feeds it, hears it, and starts it again when it dies.

One thread owns a client and calls everything; other threads may only call `wake` and read `state`
and `info`. Knows nothing of the server, text, or who waits for the tokens.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from octavo.engine_host import EngineHost
from octavo.engine_link import EngineLink
from octavo.engine_messages import (
    Abort,
    EngineFailed,
    EngineReady,
    Inspect,
    Inspected,
    StopRequested,
)
from octavo.errors import ConfigError, EngineDead
from octavo.request import EngineInfo, FinishReason, Request, StepOutput
from octavo.restart_policy import RestartPolicy

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
        step_timeout_s: an engine that says nothing for so long while it is waited for counts as
            dead; loading takes as long as it takes.
        restarts: whether and when a dead engine is started again.
    """

    def __init__(
        self,
        start_host: Callable[[], EngineHost],
        step_timeout_s: float = math.inf,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._start_host = start_host
        self._step_timeout_s = step_timeout_s
        self._restarts = restarts or RestartPolicy()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._failure: str | None = None
        self._is_stopping = False
        self._restart_at = 0.0
        self._ready_since = 0.0
        self._wake_lock = threading.Lock()
        self._engine: EngineLink | None = EngineLink(start_host())

    @property
    def state(self) -> EngineState:
        """Where the engine stands; may be read from any thread."""
        return self._state

    @property
    def info(self) -> EngineInfo:
        """What the engine that was ready last said; may be read from any thread."""
        assert self._info is not None, "wait_ready has not returned"
        return self._info

    @property
    def is_frozen(self) -> bool:
        """Whether the engine has kept silent for half of what makes it count as dead."""
        engine = self._engine
        return engine is not None and engine.silent_s > self._step_timeout_s / 2

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

    def poll(self, timeout_s: float | None, is_waited_for: bool = False) -> list[Event]:
        """Wait for the engine, a `wake` or the timeout, and return what has happened since.

        Restarts a dead engine when its time has come, so it must be called again and again; while
        requests are live (`is_waited_for`), at least once a second.
        """
        if self._engine is None and self._state is EngineState.RESTARTING:
            remaining_s = self._restart_at - time.monotonic()
            if remaining_s <= 0.0:
                return self._restart()
            timeout_s = remaining_s if timeout_s is None else min(timeout_s, remaining_s)
        sources: list[Connection | int] = [self._wakeup]
        if self._engine is not None:
            sources.append(self._engine.host.connection)
        began = time.monotonic()
        ready = wait(sources, timeout_s)
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        if self._engine is None:
            return []
        if self._engine.host.connection in ready:
            self._engine.heard()
            return self._receive(self._engine)
        if not is_waited_for or self._state is not EngineState.READY:
            self._engine.heard()
            return []
        self._engine.waited(time.monotonic() - began)
        return self._end_if_frozen(self._engine)

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

    def _receive(self, engine: EngineLink) -> list[Event]:
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
            events.append(self._lose(engine, self._failure or engine.host.describe_end()))
        return events

    def _end_if_frozen(self, engine: EngineLink) -> list[Event]:
        if engine.silent_s < self._step_timeout_s:
            return []
        limit = f"step_timeout_s ({self._step_timeout_s:g} s)"
        return [self._lose(engine, f"the engine did not answer within {limit} and was killed")]

    def _lose(self, engine: EngineLink, reason: str) -> EngineDied:
        engine.release(0.0)
        self._engine = None
        return self._plan_restart(reason)

    def _become_ready(self, info: EngineInfo) -> None:
        self._info, self._failure = info, None
        self._ready_since = time.monotonic()
        self._state = EngineState.READY

    def _restart(self) -> list[Event]:
        try:
            self._engine = EngineLink(self._start_host())
        except (OSError, ConfigError) as error:
            return [self._plan_restart(str(error))]
        return []

    def _plan_restart(self, reason: str) -> EngineDied:
        """Take note that there is no engine now, and decide whether there will be one again."""
        self._failure = reason
        if self._state is EngineState.STARTING:
            self._state = EngineState.FAILED
            return EngineDied(reason)
        was_ready = self._state is EngineState.READY
        # Why it cannot be loaded again may name files, which are not for clients.
        told = reason if was_ready else "the engine does not start, the server's log says why"
        self._failure = told
        if self._is_stopping:
            self._state = EngineState.FAILED
            logger.error("%s; it is not started again, for the server stops", reason)
            return EngineDied(f"{told} while the server stops")
        now = time.monotonic()
        delay_s = self._restarts.next_delay_s(now - self._ready_since if was_ready else 0.0)
        if delay_s is None:
            self._state = EngineState.FAILED
            logger.error("%s; gave up after %d restarts", reason, self._restarts.max_restarts)
            return EngineDied(f"{told}; it is not started again, reload the model")
        self._restart_at = now + delay_s
        self._state = EngineState.RESTARTING
        logger.error("%s; it is started again in %.1f s", reason, delay_s)
        return EngineDied(f"{told}; it is being started again, send the request again later")
