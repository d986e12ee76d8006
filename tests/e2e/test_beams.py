"""Beam search through a real server: all answers at the end, the best first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest

pytestmark = pytest.mark.e2e

COUNT = "1, 2, 3, 4, 5,"
BEAMS: dict[str, Any] = {"beam_width": 4, "n": 2, "max_tokens": 9}


def test_a_stream_brings_each_answer_whole_at_the_end(demo_server: TritonServer) -> None:
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        whole = client.generate(COUNT, **BEAMS)
        deltas = list(client.stream(COUNT, **BEAMS))
    best, second = whole.answers
    assert best.text == " 6, 7, 8,"
    assert second.text != best.text
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [
        (best.text, "length"),
        (second.text, "length"),
    ]


def test_http_takes_beams_as_strings(
    demo_server: TritonServer, post: Callable[..., tuple[int, str]]
) -> None:
    parameters = {"beam_width": "3", "length_penalty": "0.5", "max_tokens": "6"}
    body = {"text_input": COUNT, "exclude_input_in_output": True, "parameters": parameters}
    status, answer = post(demo_server, "models/octavo/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, " 6, 7,")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 65}, "beam_width is 65 but must be an integer from 1 to 64"),
        ({"beam_width": 2, "n": 3}, "n is 3 but must be an integer from 1 to 2 (beam_width)"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p is 0.5 but must be 1 where beam_width is above 1"),
        ({"length_penalty": 2}, "length_penalty is 2.0 but must be 1 where beam_width is 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    demo_server: TritonServer, params: dict[str, Any], message: str
) -> None:
    with (
        Client(demo_server.grpc_url, timeout_s=60) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate(COUNT, **params)
    assert message in str(caught.value)


def test_more_beams_than_fit_into_the_pool_are_refused(demo_server: TritonServer) -> None:
    with (
        Client(demo_server.grpc_url, timeout_s=60) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate(COUNT * 60, beam_width=64)
    assert "of 64 beams can hold" in str(caught.value)
