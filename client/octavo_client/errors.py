"""Every exception the client raises, and the gRPC status each one stands for.

    OctavoClientError
    ├── InvalidRequest           INVALID_ARGUMENT: the request is wrong; sent again it fails again
    ├── ModelNotFound            NOT_FOUND: the server has no model of this name
    ├── Unavailable              UNAVAILABLE: no server, a lost connection, a full queue, a draining
    │                            server or a dead engine; the same request may work later
    ├── RequestCancelled         CANCELLED: ended by the server, or by closing the client
    ├── RequestTimeout           DEADLINE_EXCEEDED: not finished within `timeout_s`
    └── ServerError              INTERNAL and every other status: the server's fault

Names mirror the server's own tree where both know the case. Knows nothing of gRPC objects.
"""

from __future__ import annotations


class OctavoClientError(Exception):
    """Root of every exception the client raises on purpose."""


class InvalidRequest(OctavoClientError):
    """The request is wrong; sent again it fails again."""


class ModelNotFound(OctavoClientError):
    """The server has no model of this name."""


class Unavailable(OctavoClientError):
    """The server cannot be reached or takes no request now; the same request may work later."""


class RequestCancelled(OctavoClientError):
    """The server ended the request, or the client was closed under it."""


class RequestTimeout(OctavoClientError):
    """The request was not finished within its time limit and was cancelled on the server."""


class ServerError(OctavoClientError):
    """The server failed; the request is not at fault."""


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

# What a server says, as INTERNAL, for a model whose process is gone.
_DEAD_MODEL = "is not healthy"

# The server itself refuses some requests before the model sees them, and names no status then.
_BY_MESSAGE: tuple[tuple[str, type[OctavoClientError]], ...] = (
    ("has no available versions", Unavailable),
    ("is not ready", Unavailable),
    ("has stopped accepting", Unavailable),
    ("server is stopping", Unavailable),
    ("unknown model", ModelNotFound),
)


def error_from_status(status: str, message: str) -> OctavoClientError:
    """Return the exception for the gRPC status called `status`, saying `message`."""
    if status == "INTERNAL" and _DEAD_MODEL in message:
        return Unavailable(message)
    return _BY_STATUS.get(status, ServerError)(message)


def error_from_message(message: str) -> OctavoClientError:
    """Return the exception for an error that the server sent without a status."""
    lowered = message.lower()
    kind = next((kind for text, kind in _BY_MESSAGE if text in lowered), InvalidRequest)
    return kind(message)
