"""Answers over HTTP as server-sent events; knows nothing of what an event holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any

from benchmarks.peers.side import Unavailable

TIMEOUT_S = 600.0


def post_stream(port: int, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
    """Send a request to this machine and yield each event's JSON as it comes.

    Raises:
        Unavailable: the connection failed, or the answer is not a stream.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Unavailable(f"{path} answers {response.status}: {response.read(300)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
    except (OSError, HTTPException) as error:
        raise Unavailable(f"the connection to {path} failed: {error!r}") from error
    finally:
        connection.close()
