"""Connections between the ranks of several machines: over TCP, for those who know a key.

What is said is not encrypted. A machine that vanishes without a word is noticed after a while.
Knows nothing of what is said.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from octavo.errors import EngineError

KEY_BYTES = 32

#: How long who connects may take to show that it knows the key.
_PROOF_TIMEOUT_S = 5.0

#: A machine that is gone is noticed after the first pause and so many others.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
}
_MIN_TIMEOUT_S = 1e-3

logger = logging.getLogger(__name__)


class KeyedListener:
    """Takes connections in at a port that the system chooses.

    Args:
        host: address that it is reached at, and no other.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.key = secrets.token_bytes(KEY_BYTES)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])

    def accept(self, timeout_s: float) -> Connection | None:
        """Return the next connection, of one who knows the key; None if nobody comes in time."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0.0:
            self._socket.settimeout(left_s)
            try:
                accepted, (host, *_) = self._socket.accept()
            except TimeoutError:
                return None
            connection = _prepared(accepted)
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            except (AuthenticationError, EOFError, OSError):
                logger.warning("%s connected without the key of this engine and is refused", host)
                connection.close()
                continue
            _set_timeout(connection, socket.SO_RCVTIMEO, 0.0)
            return connection
        return None

    def close(self) -> None:
        """Take nobody in any more; the connections stay."""
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, timeout_s: float) -> Connection:
    """Connect to a listener.

    Raises:
        OSError: nobody listens there, or who does has another key.
    """
    connection = _prepared(socket.create_connection(address, timeout_s))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError) as error:
        connection.close()
        raise ConnectionError("the key is wrong") from error
    _set_timeout(connection, socket.SO_RCVTIMEO, 0.0)
    return connection


class TcpSteps:
    """Tells every rank of steps, each over its connection."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._timeout_s = 0.0

    def send(self, message: bytes, timeout_s: float) -> None:
        """Tell all of a step, or by an empty message of the end of a series.

        Raises:
            EngineError: one takes nothing for `timeout_s`, or is gone.
        """
        if timeout_s != self._timeout_s:
            for connection in self._connections:
                with suppress(OSError):  # who is gone is noticed below
                    _set_timeout(connection, socket.SO_SNDTIMEO, max(timeout_s, _MIN_TIMEOUT_S))
            self._timeout_s = timeout_s
        errors = [error for each in self._connections if (error := _send(each, message))]
        if errors:
            raise EngineError(f"a rank does not hear of a step: {errors[0]}")


class TcpStepReader:
    """Hears of steps; see StepReader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            EngineError: rank zero is gone.
        """
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise EngineError("rank 0 is gone") from error


def _send(connection: Connection, message: bytes) -> OSError | None:
    try:
        connection.send_bytes(message)
    except OSError as error:
        return error
    return None


def _prepared(connected: socket.socket) -> Connection:
    """Return a connection of a socket, both ends of which have little time for what comes first."""
    connected.settimeout(None)
    # A message in two pieces must not wait for the first to be acknowledged.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection: Connection = Connection(connected.detach())
    _set_timeout(connection, socket.SO_RCVTIMEO, _PROOF_TIMEOUT_S)
    return connection


def _set_timeout(connection: Connection, option: int, timeout_s: float) -> None:
    """Bound what the kernel waits for in one call; 0.0 for no bound."""
    seconds, fraction = divmod(timeout_s, 1.0)
    borrowed = socket.socket(fileno=connection.fileno())
    try:
        borrowed.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(fraction * 1e6))
        )
    finally:
        borrowed.detach()
