"""Answers of a given form from the real server, and forms that nobody can follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest

pytestmark = pytest.mark.e2e

Post = Callable[..., tuple[int, str]]

PROMPT = "A person as JSON:"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLING = {"temperature": 1.5, "seed": 3, "top_k": 1000, "max_tokens": 120}


def test_streamed_answers_follow_a_schema_each_by_itself(demo_server: TritonServer) -> None:
    form = {"json": PERSON}
    with Client(demo_server.grpc_url, timeout_s=120) as client:
        deltas = list(client.stream(PROMPT, structured_outputs=form, n=2, **SAMPLING))
        whole = client.generate(PROMPT, structured_outputs=json.dumps(form), n=2, **SAMPLING)
    for index, answer in enumerate(whole.answers):
        text = "".join(delta.text for delta in deltas if delta.index == index)
        assert list(json.loads(text)) == ["name", "age"]
        assert (answer.text, answer.finish_reason) == (text, "stop")


def test_http_takes_a_form_as_the_text_of_its_object(demo_server: TritonServer, post: Post) -> None:
    form = json.dumps({"choice": ["positive", "negative"]})
    body = {"text_input": PROMPT, "structured_outputs": form, "temperature": "1.5"}
    status, answer = post(demo_server, "models/octavo/generate", body)
    assert status == 200
    assert json.loads(answer)["text_output"].removeprefix(PROMPT) in ("positive", "negative")


def test_a_form_that_nobody_can_follow_ends_its_request_alone(demo_server: TritonServer) -> None:
    endless: dict[str, Any] = {"json": {"type": "integer", "multipleOf": 99_999_989}}
    with Client(demo_server.grpc_url, timeout_s=120) as client:
        running = client.stream(PROMPT, max_tokens=60, ignore_eos=True)
        next(running)
        message = r"structured_outputs\.json does not compile: it takes more than 5 s"
        with pytest.raises(InvalidRequest, match=message):
            client.generate(PROMPT, structured_outputs=endless)
        with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex does not compile"):
            client.generate(PROMPT, structured_outputs={"regex": "(a"})
        assert list(running)[-1].finish_reason == "length"
