"""Checks that the server's ports are free before anything is started or loaded."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from octavo.errors import ConfigError
from octavo.local.addresses import numeric_address

# Below those that Linux gives to connections by default, and to services of Kubernetes. One that a
# connection could take meanwhile may be lost, for the server binds its ports only when models are
# loaded.
_FREE_PORTS = range(20_000, 30_000)
_NUM_TRIES = 20


def claim_ports(host: str, ports: dict[str, int]) -> dict[str, int]:
    """Return `ports` by name with each 0 replaced by a free port of `host`.

    Raises:
        ConfigError: a port is taken, named twice or out of range, or `host` is not an address
            of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        claimed = {}
        for name, port in ports.items():
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} port is {port} but must be from 0 to 65535")
            # Held until all are known, so that no port is given out twice.
            sockets.append(_bind(name, host, port) if port else _bind_any(name, host))
            claimed[name] = sockets[-1].getsockname()[1]
        return claimed
    finally:
        for held in sockets:
            held.close()


def hold_ports(host: str, ports: Mapping[str, int]) -> ExitStack:
    """Keep ports from other launchers until the stack is closed, or this process ends.

    A server binds them only when its models are loaded, and a second one that was started meanwhile
    would take the answers of the first for its own.

    Raises:
        ConfigError: another launcher holds one.
    """
    with ExitStack() as stack:
        for name, port in ports.items():
            mark = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                # A name without a file, which goes with its socket.
                mark.bind(f"\0octavo-port-{numeric_address(host)}-{port}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ConfigError(
                    f"{name} port {port} of {host} cannot be used: another octavo serve is "
                    f"starting on it; choose another with --{name}-port"
                ) from None
        return stack.pop_all()


def _bind_any(name: str, host: str) -> socket.socket:
    for _ in range(_NUM_TRIES):
        with suppress(ConfigError):
            return _bind(name, host, random.choice(_FREE_PORTS))
    return _bind(name, host, 0)


def _bind(name: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be used: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
    except OSError as error:
        bound.close()
        hint = f"; choose another with --{name}-port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"{name} port {port} of {host} cannot be used: {error.strerror}{hint}"
        ) from None
    return bound
