"""Triton's HTTP generate endpoints, called as curl and the vLLM backend's clients call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer

pytestmark = pytest.mark.e2e

Post = Callable[..., tuple[int, str]]
OpenExchange = Callable[[TritonServer], Any]

GENERATE = "models/octavo/generate"
GENERATE_STREAM = "models/octavo/generate_stream"
PROMPT = "The capital of France is"
ANSWER = " Paris."


def events(body: str) -> list[dict[str, Any]]:
    """Return the JSON of server-sent events; there is nothing else between them."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize(
    "parameters",
    [{"max_tokens": 2, "temperature": 0}, {"max_tokens": "2", "temperature": "0.0"}],
    ids=["numbers", "strings"],
)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_generate_reads_parameters(
    demo_server: TritonServer, post: Post, parameters: dict[str, Any], nested: bool
) -> None:
    given = {"parameters": parameters} if nested else parameters
    status, body = post(demo_server, GENERATE, {"text_input": PROMPT, **given})
    assert (status, json.loads(body)["text_output"]) == (200, PROMPT + ANSWER)


def test_generate_stream_sends_an_event_a_delta(demo_server: TritonServer, post: Post) -> None:
    request = {
        "text_input": PROMPT,
        "stream": True,
        "return_finish_reason": True,
        "return_num_output_tokens": True,
        "parameters": {"max_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    status, body = post(demo_server, GENERATE_STREAM, request)
    assert status == 200
    deltas = events(body)
    assert len(deltas) > 4
    assert "".join(delta["text_output"] for delta in deltas).startswith(ANSWER)
    assert sum(delta["num_output_tokens"] for delta in deltas) == 8
    assert [delta["finish_reason"] for delta in deltas] == [""] * (len(deltas) - 1) + ["length"]


def vllm_request(stream: bool, **params: Any) -> dict[str, Any]:
    """Return the seven tensors that Triton's OpenAI frontend sends to the vLLM backend."""
    always = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "n": 1, "ignore_eos": False}
    return {
        "return_logprobs": "logprobs" in params,
        "text_input": PROMPT,
        "stream": stream,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({**always, **params}),
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": "1"}], ids=["plain", "logprobs"])
def test_vllm_layout_is_served_as_its_clients_send_it(
    demo_server: TritonServer, post: Post, exchange: OpenExchange, logprobs: dict[str, str]
) -> None:
    params = {"temperature": "0.0", "top_p": "0.95", "max_tokens": "2", **logprobs}
    request = vllm_request(stream=True, **params)
    with exchange(demo_server) as stream:
        stream.send(request)
        responses = stream.receive_all()
    outputs = {"text_output", "num_input_tokens", "num_output_tokens", *logprobs}
    assert all(set(response.outputs) == outputs for response in responses)
    assert "".join(response.text for response in responses) == ANSWER
    assert all(response.outputs["num_input_tokens"] == [5] for response in responses)
    assert sum(response.outputs["num_output_tokens"][0] for response in responses) == 2
    status, body = post(demo_server, GENERATE_STREAM, request)
    assert status == 200
    assert "".join(delta["text_output"] for delta in events(body)) == ANSWER
    status, body = post(demo_server, GENERATE, vllm_request(stream=False, **params))
    assert (status, json.loads(body)["text_output"]) == (200, ANSWER)


def test_vllm_form_of_a_named_tool_is_followed(
    demo_server: TritonServer, exchange: OpenExchange
) -> None:
    properties = {"a": {"const": 7}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
    }
    options = dict.fromkeys(("regex", "choice", "grammar", "json_object", "whitespace_pattern"))
    flags = dict.fromkeys(("disable_any_whitespace", "_backend_was_auto"), False)
    form = json.dumps({"json": json.dumps(schema), **options, **flags})
    with exchange(demo_server) as stream:
        stream.send(vllm_request(stream=False, temperature=0, structured_outputs=form))
        (response,) = stream.receive_all()
    assert json.loads(response.text) == {"a": 7}


def test_documented_curl_of_the_vllm_backend_works(demo_server: TritonServer, post: Post) -> None:
    parameters = {"stream": False, "temperature": 0, "max_tokens": 2}
    status, body = post(demo_server, GENERATE, {"text_input": PROMPT, "parameters": parameters})
    assert (status, json.loads(body)["text_output"]) == (200, PROMPT + ANSWER)


def test_scheduling_keys_beside_the_tensor_are_checked(
    tiny_server: TritonServer, post: Post
) -> None:
    parameters = {"priority": 1, "deadline_ms": 60_000, "tenant": "a", "cache_salt": "b"}
    request = {"text_input": "a", "sampling_parameters": '{"max_tokens": 2}'}
    status, _ = post(tiny_server, GENERATE, {**request, "parameters": parameters})
    assert status == 200
    status, body = post(tiny_server, GENERATE, {**request, "parameters": {"priority": "high"}})
    assert status == 400
    error = json.loads(body)["error"]
    assert error == "INVALID_ARG: priority is 'high' but must be an integer"


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"stream": False}, "the request has no prompt but must have one of text_input"),
        ({"text_input": "a", "temperature": -1}, "temperature is -1"),
        ({"text_input": "a", "temprature": 1}, "did you mean 'temperature'?"),
        ({"text_input": "a", "n": 0}, "n is 0 but must be an integer from 1 to 128"),
        ({"text_input": "a", "deadline_ms": -5}, "deadline_ms is -5.0 but must be a number"),
        ({"text_input": "a", "max_tokens": [1]}, "max_tokens"),
        ({"text_input": "a", "timeout": -1}, "timeout is -1 but must be microseconds from 0"),
        ({"text_input": ""}, "text_input is empty"),
        ({"messages": "no JSON"}, "messages is not valid JSON"),
        ({"messages": '[{"role": "king"}]'}, "messages[0] has role 'king' but allowed are system"),
        ({"text_input": "a", "skip_special_tokens": "no"}, "skip_special_tokens is 'no' but must"),
        ({"input_ids": [1, 49152]}, "input_ids has 49152 at position 1"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("endpoint", [GENERATE, GENERATE_STREAM])
def test_wrong_requests_answer_a_status_and_a_reason(
    tiny_server: TritonServer,
    post: Post,
    endpoint: str,
    request_body: Any,
    message: str,
) -> None:
    status, body = post(tiny_server, endpoint, request_body)
    assert status == 400
    assert message in body
    assert "Traceback" not in body


def test_unknown_model_is_named(tiny_server: TritonServer, post: Post) -> None:
    status, body = post(tiny_server, "models/nonesuch/generate", {"text_input": "a"})
    assert status in (400, 404)
    assert "nonesuch" in body


def test_generate_with_stream_gets_tritons_own_error_under_status_200(
    tiny_server: TritonServer, post: Post
) -> None:
    """What docs/troubleshooting.md quotes; the server makes the whole answer before it says so."""
    request = {"text_input": "x", "stream": True, "max_tokens": 8, "ignore_eos": True}
    status, body = post(tiny_server, GENERATE, request)
    assert (status, list(json.loads(body))) == (200, ["error"])
    assert json.loads(body)["error"] == (
        "generate expects model to produce exactly 1 response, use generate stream for model "
        "that generates various number of responses"
    )


def test_a_body_of_many_megabytes_is_refused_and_the_server_stays(
    tiny_server: TritonServer, post: Post
) -> None:
    status, body = post(tiny_server, GENERATE, {"text_input": "a " * 10_000_000})
    assert status == 400
    assert "text_input has 20,000,000 bytes but max_prompt_bytes is 8,388,608" in body
    assert post(tiny_server, GENERATE, {"text_input": "x", "max_tokens": 1})[0] == 200
