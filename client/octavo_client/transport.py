"""What both clients share of gRPC: the streaming call, channel options, and errors made ours.

One request is one call of the server's streaming method, so that each request is cancelled
alone, while all calls of a client share one connection. The method takes a stream of
requests; a call that sends a single message looks the same on the wire and needs no thread
to send it. The header `triton_grpc_error`, which gives errors a status, is not sent: Triton 2.51
crashes (SIGSEGV) now and then after such an error. Knows nothing of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from octavo_client.errors import (
    InvalidRequest,
    OctavoClientError,
    RequestCancelled,
    Unavailable,
    error_from_status,
)

STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
STREAM_CODERS = {
    "request_serializer": service_pb2.ModelInferRequest.SerializeToString,
    "response_deserializer": service_pb2.ModelStreamInferResponse.FromString,
}

#: A stock Triton server drops a connection that is pinged more often than every 300 s.
DEFAULT_KEEPALIVE_S = 310.0
_KEEPALIVE_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_RECONNECT_PAUSE_S = 1.0

_LOOPBACK = ("127.", "localhost", "[::1]")
_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


def channel_options(url: str, keepalive_s: float) -> list[tuple[str, int]]:
    """Return the options of a channel to `url` that pings a silent server every `keepalive_s`."""
    if not keepalive_s > 0:
        raise InvalidRequest(f"keepalive_s is {keepalive_s} but must be a positive number")
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", _milliseconds(keepalive_s)),
        # gRPC waits for the longer of the two, and the second is 60 s by default.
        ("grpc.keepalive_timeout_ms", _milliseconds(_KEEPALIVE_TIMEOUT_S)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(_KEEPALIVE_TIMEOUT_S)),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted server is found again within a second, not after gRPC's two minutes.
        ("grpc.min_reconnect_backoff_ms", _milliseconds(_CONNECT_TIMEOUT_S)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(_MAX_RECONNECT_PAUSE_S)),
        # Clients of one process would otherwise share a connection behind each other's back.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0 if url.startswith(_LOOPBACK) else 1),
    ]


def tls_credentials(
    ca: str | Path | None = None, cert: str | Path | None = None, key: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Return what makes a client's connection encrypted, from files in PEM form.

    Args:
        ca: certificates to trust; by default those that gRPC brings along.
        cert: the client's own certificate chain, for a server that asks for one.
        key: the private key of `cert`.

    Raises:
        InvalidRequest: one of `cert` and `key` stands without the other.
        OSError: a file cannot be read.
    """
    if (cert is None) != (key is None):
        given, other = ("key", "cert") if cert is None else ("cert", "key")
        raise InvalidRequest(f"{given} is given without {other} but must have it beside")
    pems = [None if path is None else Path(path).read_bytes() for path in (ca, key, cert)]
    return grpc.ssl_channel_credentials(*pems)


def call_metadata(headers: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the headers of every call as gRPC takes them.

    Raises:
        InvalidRequest: a name or a value is none that gRPC can send; values are not shown, for
            they may be secrets.
    """
    pairs = tuple((name.lower(), value) for name, value in (headers or {}).items())
    for name, value in pairs:
        if not _HEADER_NAME.fullmatch(name) or name.startswith("grpc-") or name.endswith("-bin"):
            raise InvalidRequest(
                f"header {name!r} must be of letters, digits, '_', '.' and '-', "
                "and may neither begin with grpc- nor end with -bin"
            )
        if not _HEADER_VALUE.fullmatch(value):
            raise InvalidRequest(f"the value of header {name!r} must be of printable ASCII")
    return pairs


def time_limit(timeout_s: float | None, default_s: float | None) -> float | None:
    """Return the limit of one request in seconds; None means no limit.

    Raises:
        InvalidRequest: the limit is not a positive number.
    """
    limit = default_s if timeout_s is None else timeout_s
    if limit is None or limit == math.inf:
        return None
    if not limit > 0:
        raise InvalidRequest(f"timeout_s is {limit} but must be a positive number")
    return limit


class StreamState:
    """Where the stream of one request stands, and what the end of its call means."""

    def __init__(self, url: str, timeout_s: float | None) -> None:
        self.complete = False
        """Whether the last response has been read."""
        self.closed = False
        """Whether nothing more will be read."""
        self._url = url
        self._timeout_s = timeout_s

    def end(self, error: Exception | None) -> OctavoClientError | None:
        """Close the stream because its call ended; return what to raise, None after a whole answer.

        Args:
            error: what gRPC raised; None when the call ended without an error.
        """
        closed_by_us, self.closed = self.closed, True
        if self.complete:
            return None
        if closed_by_us:
            return RequestCancelled("the stream was closed while it was read")
        if isinstance(error, grpc.RpcError):
            return error_from_call(error, self._url, self._timeout_s)
        return Unavailable(f"server {self._url} ended the stream before its last response")


def error_from_call(error: Any, url: str, timeout_s: float | None) -> OctavoClientError:
    """Turn the `grpc.RpcError` of a call to `url` into the client's own exception."""
    status, message = error.code().name, error.details() or "no details were given"
    if "handshake failed" in message:
        reason = message.removesuffix(": OK").rpartition(": ")[2]
        message = f"no encrypted connection to {url}: {reason}"
    elif message.startswith("failed to connect"):
        message = f"no gRPC server answers at {url}: {message.rpartition(': ')[2]}"
    elif status == "UNAVAILABLE":
        message = f"server {url} is unavailable: {message}"
    if status == "DEADLINE_EXCEEDED" and timeout_s is not None:
        message = f"the request was not finished within {timeout_s:g} s and was cancelled"
    return error_from_status(status, message)


def closed_error(url: str) -> OctavoClientError:
    """Return the exception for using a closed client."""
    return OctavoClientError(f"the client for {url} is closed")


def _milliseconds(seconds: float) -> int:
    return min(round(seconds * 1000), 2**31 - 1)
