"""Requests that run out of time, while they run and while they wait, by every way to say so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from octavo.local.triton_server import TritonServer
from octavo_client import Client, RequestCancelled

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]
Post = Callable[..., tuple[int, str]]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]

LONG = {"max_tokens": 30_000, "ignore_eos": True, "seed": 1}
#: A busy machine may be this late.
SLACK_S = 2.0
TOO_LATE = (
    "the request passed its deadline of 300 ms before its first token; "
    "send it again when fewer requests wait, or give it more time"
)


@pytest.fixture
def busy(narrow_server: TritonServer, metrics: Metrics, become: Become) -> Iterator[TritonServer]:
    """Keep both places of a server taken; afterwards all must have their blocks back."""
    with Client(narrow_server.grpc_url, timeout_s=120) as client:
        streams = [client.stream("x", **LONG) for _ in range(2)]
        for stream in streams:
            next(stream)
        yield narrow_server
        for stream in streams:
            assert next(stream).finish_reason is None, "it should run on"
            stream.close()
    assert become(lambda: metrics(narrow_server)["kv_blocks_used"] == 0)


@pytest.mark.parametrize("n", [1, 3])
def test_deadline_while_running_returns_what_there_is(
    tiny_server: TritonServer, metrics: Metrics, become: Become, n: int
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        started = time.monotonic()
        completion = client.generate("x", **LONG, n=n, deadline_ms=500)
        assert 0.5 <= time.monotonic() - started < 0.5 + SLACK_S
        full = client.generate("x", **{**LONG, "max_tokens": completion.num_output_tokens})
    assert [answer.finish_reason for answer in completion.answers] == ["deadline"] * n
    assert completion.token_ids == full.token_ids
    assert completion.text == full.text
    assert become(lambda: metrics(tiny_server)["kv_blocks_used"] == 0)


def test_deadline_ends_a_stream_after_its_deltas(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        deltas = list(client.stream("x", **LONG, deadline_ms="500"))
    assert len(deltas) > 2
    assert [delta.finish_reason for delta in deltas[-2:]] == [None, "deadline"]


def test_protocol_timeout_over_grpc_is_a_deadline(
    tiny_server: TritonServer, exchange: OpenExchange
) -> None:
    request = {"text_input": "x", "return_finish_reason": True}
    with exchange(tiny_server) as stream:
        stream.send({**request, "sampling_parameters": json.dumps(LONG)}, timeout=500_000)
        (response,) = stream.receive_all()
    assert response.outputs["finish_reason"] == ["deadline"]
    assert len(response.text) > 10


@pytest.mark.parametrize("limit", [{"timeout": 500_000}, {"deadline_ms": 500}], ids=str)
def test_limits_over_http_are_deadlines(
    tiny_server: TritonServer, post: Post, limit: dict[str, int]
) -> None:
    body = {"text_input": "x", "return_finish_reason": True, "parameters": {**LONG, **limit}}
    status, answer = post(tiny_server, "models/octavo/generate", body)
    assert (status, json.loads(answer)["finish_reason"]) == (200, "deadline")


def test_earliest_of_several_limits_counts(
    tiny_server: TritonServer, exchange: OpenExchange
) -> None:
    request = {"text_input": "x", "return_finish_reason": True}
    sampling = json.dumps({**LONG, "deadline_ms": 500})
    with exchange(tiny_server) as stream:
        started = time.monotonic()
        stream.send({**request, "sampling_parameters": sampling}, timeout=60_000_000)
        (response,) = stream.receive_all()
        assert 0.5 <= time.monotonic() - started < 0.5 + SLACK_S
    assert response.outputs["finish_reason"] == ["deadline"]


def test_deadline_while_waiting_is_an_error_and_others_run_on(busy: TritonServer) -> None:
    with Client(busy.grpc_url, timeout_s=60) as client:
        started = time.monotonic()
        with pytest.raises(RequestCancelled) as caught:
            client.generate("x", **LONG, deadline_ms=300)
        assert 0.3 <= time.monotonic() - started < 0.3 + SLACK_S
    assert str(caught.value) == TOO_LATE


def test_deadline_while_waiting_is_told_over_http_and_to_the_stock_client(
    busy: TritonServer, post: Post, exchange: OpenExchange
) -> None:
    body = {"text_input": "x", "parameters": {"timeout": 300_000}}
    status, answer = post(busy, "models/octavo/generate", body)
    assert status == 400  # as Triton has it for most codes
    assert json.loads(answer)["error"] == f"CANCELLED: {TOO_LATE}"
    with exchange(busy) as stream:
        stream.send({"text_input": "x"}, timeout=300_000)
        with pytest.raises(InferenceServerException) as caught:
            stream.receive()
    assert caught.value.message() == f"CANCELLED: {TOO_LATE}"
