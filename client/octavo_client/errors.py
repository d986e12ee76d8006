"""Every exception the client raises, and the gRPC status each one stands for.

    OctavoClientError
    ├── InvalidRequest           INVALID_ARGUMENT: the request is wrong; sent again it fails again
    ├── ModelNotFound            NOT_FOUND: the server has no model of this name
    ├── Unavailable              UNAVAILABLE: no server, a lost connection, a full queue, a draining
    │                            server or a dead engine; the same request may work later
    ├── RequestCancelled         CANCELLED: ended by the server (as when its deadline passes before
    │                            the first token), or by closing the client
    ├── RequestTimeout           DEADLINE_EXCEEDED: not finished within `timeout_s`
    └── ServerError              INTERNAL and every other status: the server's fault

Names mirror the server's own tree where both know the case. Knows nothing of gRPC objects.
"""

from __future__ import annotations

from typing import ClassVar


class OctavoClientError(Exception):
    """Root of every exception the client raises on purpose."""

    code: ClassVar[str] = "UNKNOWN"
    """One word for the kind, as the server's messages open with where it knows the kind too."""


class InvalidRequest(OctavoClientError):
    """The request is wrong; sent again it fails again."""

    code = "INVALID_ARG"


class ModelNotFound(OctavoClientError):
    """The server has no model of this name."""

    code = "NOT_FOUND"


class Unavailable(OctavoClientError):
    """The server cannot be reached or takes no request now; the same request may work later."""

    code = "UNAVAILABLE"


class RequestCancelled(OctavoClientError):
    """The server ended the request, or the client was closed under it."""

    code = "CANCELLED"


class RequestTimeout(OctavoClientError):
    """The request was not finished within its time limit and was cancelled on the server."""

    code = "TIMEOUT"


class ServerError(OctavoClientError):
    """The server failed; the request is not at fault."""

    code = "INTERNAL"


#: gRPC status name to exception; every status not named here is a `ServerError`.
_BY_STATUS: dict[str, type[OctavoClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "RESOURCE_EXHAUSTED": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": RequestCancelled,
    "DEADLINE_EXCEEDED": RequestTimeout,
}

#: Code with which the model opens an error message, as `CODE: message`; gRPC drops the code itself.
_BY_CODE: dict[str, type[OctavoClientError]] = {
    kind.code: kind for kind in (InvalidRequest, Unavailable, RequestCancelled, ServerError)
}

# What the server itself says names no code; the rest of it is about requests that do not fit.
_BY_WORDS: tuple[tuple[str, type[OctavoClientError]], ...] = (
    ("has no available versions", Unavailable),
    ("is not ready", Unavailable),
    ("is not healthy", Unavailable),
    ("has stopped accepting", Unavailable),
    ("server is stopping", Unavailable),
    ("unknown model", ModelNotFound),
    ("failed to process the request", ServerError),
)


def error_from_status(status: str, message: str) -> OctavoClientError:
    """Return the exception for the gRPC status called `status`, saying `message`."""
    return _BY_STATUS.get(status, ServerError)(message)


def error_from_message(message: str) -> OctavoClientError:
    """Return the exception for an error that came as a message without a gRPC status."""
    code, _, rest = message.partition(": ")
    if code in _BY_CODE:
        return _BY_CODE[code](rest)
    lowered = message.lower()
    kind = next((kind for words, kind in _BY_WORDS if words in lowered), InvalidRequest)
    return kind(message)
