"""The names by which a request is known outside, however odd they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.triton_model.arrival import MAX_ID_LENGTH, read_arrival
from octavo.triton_model.codec import decode_request

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
SERVERS = json.dumps({"traceparent": PARENT.replace("a", "c")})

MakeRequest = Callable[..., Any]


@pytest.mark.parametrize(
    ("servers", "parameters", "context"),
    [
        (None, {}, ""),
        (SERVERS, {}, SERVERS),
        (SERVERS, {"traceparent": PARENT}, SERVERS),
        (None, {"traceparent": PARENT}, json.dumps({"traceparent": PARENT})),
        (
            None,
            {"traceparent": PARENT, "tracestate": "vendor=1", "temperature": 0},
            json.dumps({"traceparent": PARENT, "tracestate": "vendor=1"}),
        ),
        (None, {"tracestate": "vendor=1"}, ""),
        (None, {"traceparent": 5}, ""),
        (None, {"traceparent": "x" * 513}, ""),
    ],
)
def test_the_servers_trace_comes_before_the_clients(
    make_request: MakeRequest, servers: str | None, parameters: dict[str, Any], context: str
) -> None:
    request = make_request(parameters, trace_context=servers, text_input="a")
    assert read_arrival(request, 1.0).trace_context == context


def test_a_trace_is_no_sampling_key(make_request: MakeRequest) -> None:
    parameters = {"traceparent": PARENT, "tracestate": "vendor=1", "top_k": 3}
    decoded = decode_request(make_request(parameters, text_input="a"), 300, 1000)
    assert decoded.params.top_k == 3


def test_a_long_name_is_cut_and_one_that_cannot_be_read_is_absent(
    make_request: MakeRequest,
) -> None:
    assert read_arrival(make_request(request_id="x" * 1000), 1.0).client_request_id == (
        "x" * MAX_ID_LENGTH
    )
    unreadable = make_request(trace_context=SERVERS)

    def fail() -> str:
        return b"\xff".decode()

    unreadable.request_id = fail
    arrival = read_arrival(unreadable, 1.0)
    assert (arrival.client_request_id, arrival.trace_context) == ("", SERVERS)
