"""Asks a server for its metrics over HTTP. Knows nothing of what they mean."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from octavo_client.errors import Unavailable
from octavo_client.metrics_page import Sample, parse

#: Seconds that a server gets for its metrics.
TIMEOUT_S = 5.0


def fetch(url: str) -> Sample:
    """Ask a server for its metrics.

    Raises:
        Unavailable: it cannot be reached, refuses, or answers with something else.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return parse(answer.read().decode(), time.monotonic())
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
