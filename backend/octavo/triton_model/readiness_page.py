"""Asks Triton over HTTP, as any client may, whether it takes requests for a model.

What Triton offers a stub for that, `is_model_ready`, keeps Python's lock until Triton has answered:
from 26.03 on Triton asks the model itself first, and all of the stub stands still until that fails
after five seconds. While the server stops it now and then crashes it (24.10). Knows nothing of what
an answer means.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from octavo.local.addresses import reachable_address

_TIMEOUT_S = 5.0
_PORT = "8000"
_EVERY_ADDRESS = "0.0.0.0"
#: Triton's answer for a model, or a server, that takes no requests; 404 for one that is not there.
_REFUSALS = (400, 404, 503)


class ReadinessPage:
    """The page of one version of a model, which HTTP may have or not, and may restrict."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._was_there = False

    def is_refusing(self) -> bool:
        """Return whether Triton takes no requests for the model; False if that is not known."""
        try:
            status = self._status()
        except TimeoutError:
            return False  # a busy machine
        except (OSError, http.client.HTTPException):
            return self._was_there
        self._was_there = True
        return status in _REFUSALS

    def _status(self) -> int:
        connection = http.client.HTTPConnection(self._url.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", self._url.path)
            return connection.getresponse().status
        finally:
            connection.close()


def readiness_url(command: Sequence[str], model: str, version: str) -> str | None:
    """Return the page of a model on the server that `command` started, or None if it has none."""
    if Path(command[0]).name != "tritonserver":
        return None
    flags = dict(_flag(*pair) for pair in zip(command, [*command[1:], ""], strict=True))
    is_off = flags.get("--allow-http", "true").lower() in ("false", "0")
    is_shared = "--reuse-http-port" in flags  # with servers that may answer for this one
    if is_off or is_shared:
        return None
    host = flags.get("--http-address", _EVERY_ADDRESS).removeprefix("ipv6:")
    address = reachable_address(host, int(flags.get("--http-port", _PORT)))
    return f"http://{address}/v2/models/{model}/versions/{version}/ready"


def command_of(process_id: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{process_id}/cmdline").read_text().rstrip("\0").split("\0")


def _flag(word: str, next_word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    return name, value if equals else next_word
