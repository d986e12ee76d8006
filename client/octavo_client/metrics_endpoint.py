"""Asks a server for its metrics over HTTP. Knows nothing of what they mean."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from octavo_client.errors import Unavailable
from octavo_client.metrics_page import Sample, parse

#: Seconds that a server gets for its metrics, however it spreads them.
TIMEOUT_S = 5.0
#: A server of a hundred models has 2 MB of metrics.
MAX_BYTES = 16 << 20
_PART_BYTES = 1 << 16


def fetch(url: str) -> Sample:
    """Ask a server for its metrics.

    Raises:
        Unavailable: it cannot be reached, refuses, or answers with something else.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return parse(_read(answer).decode(), time.monotonic())
    except urllib.error.HTTPError as error:
        with error:
            reason = f"status {error.code}"
    except urllib.error.URLError as error:
        reason = str(getattr(error.reason, "strerror", None) or error.reason).lower()
    except (OSError, http.client.HTTPException) as error:
        reason = str(error).lower() or type(error).__name__
    except ValueError:
        reason = "the answer is not in Prometheus' format"
    raise Unavailable(f"no metrics from {url}: {reason}")


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        OSError: it is too large, or is not there in time.
        http.client.IncompleteRead: it ends too early.
    """
    deadline = time.monotonic() + TIMEOUT_S
    length, body = answer.length, bytearray()
    while part := answer.read1(_PART_BYTES):
        body += part
        if len(body) > MAX_BYTES:
            raise OSError(f"the answer has more than {MAX_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer took more than {TIMEOUT_S:g} s")
    if length is not None and len(body) < length:
        raise http.client.IncompleteRead(bytes(body), length - len(body))
    return bytes(body)
