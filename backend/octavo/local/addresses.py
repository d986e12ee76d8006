"""How an address is written for the parts of Triton that listen on it, and for who connects.

Triton's HTTP takes numbers only: of a name such as localhost it makes 255.255.255.255 without a
word. Knows nothing of ports that are taken, nor of processes.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Mapping

from octavo.errors import ConfigError

#: What stands for every address of this machine, and the one of them that it reaches itself by.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def numeric_address(host: str) -> str:
    """Return the first address of `host` in numbers.

    Raises:
        ConfigError: there is none.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be used: {error.strerror or error}") from None
    return str(found[0][4][0])


def listen_address(host: str, kind: str) -> str:
    """Return what the flag `--KIND-address` must say; kinds are `http`, `grpc` and `metrics`."""
    address = numeric_address(host)
    if ":" not in address:
        return address
    return f"[{address}]" if kind == "grpc" else f"ipv6:{address}"


def reachable_address(host: str, port: int) -> str:
    """Return address and port as a URL of this machine has them."""
    address = numeric_address(host)
    address = _EVERY.get(address, address)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def answers(url: str, headers: Mapping[str, str]) -> bool:
    """Return whether a page is there within five seconds, for who sends these headers."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        urllib.request.urlopen(request, timeout=5.0).close()
    except OSError:
        return False
    return True
