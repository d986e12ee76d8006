"""A client that goes away gives its place and its blocks back, wherever its request stands."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
OpenExchange = Callable[[TritonServer], Any]
Figures = Callable[[], dict[str, float]]

LONG = {"max_tokens": 30_000, "ignore_eos": True, "temperature": 1, "seed": 1}
SHORT_PROMPT = [7] * 20
# At 16 tokens a step its prefill takes thousands of steps.
LONG_PROMPT = [7] * 32_000
# The figures themselves are written every 100 ms.
BOUND_S = 5.0


class GrpcRequest:
    """A request of our client on a connection of its own."""

    def __init__(self, server: TritonServer, prompt: list[int]) -> None:
        self._client = Client(server.grpc_url, timeout_s=120)
        self._stream = self._client.stream(input_ids=prompt, **LONG)

    def read_some(self) -> None:
        assert next(self._stream).text

    def drop(self) -> None:
        self._stream.close()
        self._client.close()


class HttpRequest:
    """A request to one of the generate endpoints on a socket of its own."""

    def __init__(
        self,
        server: TritonServer,
        prompt: list[int],
        path: str = "generate_stream",
        **params: Any,
    ) -> None:
        address = server.http_url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(address, timeout=120)
        streaming = path == "generate_stream"
        body = {"input_ids": prompt, "stream": streaming, "parameters": {**LONG, **params}}
        self._connection.request("POST", f"/v2/models/octavo/{path}", json.dumps(body))

    def read_some(self) -> None:
        assert self._connection.getresponse().readline().startswith(b"data: ")

    def drop(self) -> None:
        self._connection.close()


EVERY_WAY = pytest.mark.parametrize(
    "kind", [GrpcRequest, HttpRequest], ids=["grpc cancel", "dropped http connection"]
)


@pytest.fixture
def figures(narrow_server: TritonServer, metrics: Metrics, become: Become) -> Iterator[Figures]:
    """Return a reader of the server's figures; before and after each test it must be idle."""

    def is_idle() -> bool:
        now = metrics(narrow_server)
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        return [now[name] for name in names] == [0, 0, 0]

    assert become(is_idle)
    yield lambda: metrics(narrow_server)
    assert become(is_idle, BOUND_S)


@EVERY_WAY
def test_running_request_gives_its_blocks_back(
    narrow_server: TritonServer, figures: Figures, become: Become, kind: Any
) -> None:
    request = kind(narrow_server, SHORT_PROMPT)
    request.read_some()
    assert become(lambda: figures()["kv_blocks_used"] >= 2)
    assert figures()["num_requests_running"] == 1
    request.drop()
    assert become(lambda: figures()["kv_blocks_used"] == 0, BOUND_S)
    assert figures()["num_requests_running"] == 0


def test_half_prefilled_request_gives_its_blocks_back(
    narrow_server: TritonServer, figures: Figures, become: Become
) -> None:
    request = GrpcRequest(narrow_server, LONG_PROMPT)
    assert become(lambda: figures()["kv_blocks_used"] >= 2)
    request.drop()
    seen = []
    assert become(lambda: seen.append(figures()["kv_blocks_used"]) or seen[-1] == 0, BOUND_S)
    assert max(seen) < len(LONG_PROMPT) / 16, "all of it was prefilled"
    assert figures()["num_requests_running"] == 0


def test_waiting_request_leaves_the_queue_and_others_run_on(
    narrow_server: TritonServer, figures: Figures, become: Become
) -> None:
    running = [GrpcRequest(narrow_server, SHORT_PROMPT) for _ in range(2)]
    for request in running:
        request.read_some()
    waiting = GrpcRequest(narrow_server, SHORT_PROMPT)
    assert become(lambda: figures()["num_requests_waiting"] == 1)
    waiting.drop()
    assert become(lambda: figures()["num_requests_waiting"] == 0, BOUND_S)
    assert figures()["num_requests_running"] == 2
    for request in running:
        request.read_some()
        request.drop()


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_http_connection_dropped_before_the_first_token_is_noticed_with_it(
    narrow_server: TritonServer, figures: Figures, become: Become, path: str
) -> None:
    """The server does not look at an HTTP connection before it has something to send.

    `generate` sends once, so there the whole answer is made; here it is short.
    """
    running = [GrpcRequest(narrow_server, SHORT_PROMPT) for _ in range(2)]
    for request in running:
        request.read_some()
    params = {"max_tokens": 40} if path == "generate" else {}
    waiting = HttpRequest(narrow_server, SHORT_PROMPT, path, **params)
    assert become(lambda: figures()["num_requests_waiting"] == 1)
    waiting.drop()
    running[0].drop()
    assert become(lambda: figures()["num_requests_waiting"] == 0, BOUND_S)
    assert become(lambda: figures()["num_requests_running"] == 1, BOUND_S)
    running[1].read_some()
    running[1].drop()


@EVERY_WAY
def test_place_of_a_dropped_request_goes_to_the_next(
    narrow_server: TritonServer, figures: Figures, become: Become, kind: Any
) -> None:
    running = [kind(narrow_server, SHORT_PROMPT) for _ in range(2)]
    for request in running:
        request.read_some()
    third = GrpcRequest(narrow_server, SHORT_PROMPT)
    assert become(lambda: figures()["num_requests_waiting"] == 1)
    running[0].drop()
    third.read_some()
    running[1].drop()
    third.drop()


def test_many_requests_dropped_at_once_leave_nothing(
    narrow_server: TritonServer, figures: Figures, become: Become
) -> None:
    client = Client(narrow_server.grpc_url, timeout_s=120)
    # Requests that are sent at once may arrive in any order, so the first goes alone.
    streams = [client.stream(input_ids=SHORT_PROMPT, **LONG)]
    streams += [client.stream(input_ids=SHORT_PROMPT, **LONG) for _ in range(39)]
    assert become(lambda: figures()["num_requests_waiting"] == 38)
    client.close()
    del streams
    assert become(lambda: figures()["num_requests_waiting"] == 0, BOUND_S)
    assert become(lambda: figures()["kv_blocks_used"] == 0, BOUND_S)


def test_stock_client_cancels_all_requests_of_its_stream(
    narrow_server: TritonServer, figures: Figures, become: Become, exchange: OpenExchange
) -> None:
    sampling = json.dumps(LONG)
    with exchange(narrow_server) as stream:
        for _ in range(4):
            stream.send({"text_input": "a", "stream": True, "sampling_parameters": sampling})
        stream.receive()
        assert become(lambda: figures()["num_requests_waiting"] == 2)
    assert become(lambda: figures()["num_requests_waiting"] == 0, BOUND_S)
    assert become(lambda: figures()["kv_blocks_used"] == 0, BOUND_S)
