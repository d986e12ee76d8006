"""Several answers to one prompt, as our client, the stock client and HTTP see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]
Post = Callable[..., tuple[int, str]]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]

PROMPT = "The capital of France is"
SAMPLING = {"n": 3, "seed": 7, "max_tokens": 12, "ignore_eos": True}
FLAGS = {
    f"return_{name}": True
    for name in ("token_ids", "finish_reason", "num_input_tokens", "num_output_tokens")
}


@pytest.fixture(scope="module")
def answers(demo_server: TritonServer) -> tuple[Any, ...]:
    """Return the three answers as our client has them when it does not stream."""
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        return client.generate(PROMPT, **SAMPLING).answers


def test_answers_differ_and_the_first_is_that_of_n_1(
    demo_server: TritonServer, answers: tuple[Any, ...]
) -> None:
    assert len({answer.token_ids for answer in answers}) == 3
    assert [answer.num_output_tokens for answer in answers] == [12, 12, 12]
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        assert client.generate(PROMPT, **{**SAMPLING, "n": 1}).answers == answers[:1]


def test_deltas_of_each_answer_add_up_to_it(
    demo_server: TritonServer, answers: tuple[Any, ...]
) -> None:
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        deltas = list(client.stream(PROMPT, **SAMPLING))
    for index, answer in enumerate(answers):
        own = [delta for delta in deltas if delta.index == index]
        assert len(own) > 1
        assert "".join(delta.text for delta in own) == answer.text
        assert tuple(token for delta in own for token in delta.token_ids) == answer.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]


def test_stock_client_gets_an_element_for_each_answer(
    demo_server: TritonServer, exchange: OpenExchange, answers: tuple[Any, ...]
) -> None:
    request = {"text_input": PROMPT, "sampling_parameters": json.dumps(SAMPLING), **FLAGS}
    with exchange(demo_server) as stream:
        stream.send(request)
        (response,) = stream.receive_all()
        assert response.outputs == {
            "text_output": [PROMPT + answer.text for answer in answers],
            "finish_reason": ["length"] * 3,
            "token_ids": [token for answer in answers for token in answer.token_ids],
            "num_input_tokens": [5],
            "num_output_tokens": [12, 12, 12],
        }
        stream.send({**request, "stream": True, "exclude_input_in_output": False})
        responses = stream.receive_all()
    columns = zip(*(response.outputs["text_output"] for response in responses), strict=True)
    assert ["".join(column) for column in columns] == [PROMPT + each.text for each in answers]
    counts = zip(*(response.outputs["num_output_tokens"] for response in responses), strict=True)
    assert [sum(column) for column in counts] == [12, 12, 12]
    assert responses[0].outputs["finish_reason"] == ["", "", ""]


def test_http_gives_a_list_of_answers(
    demo_server: TritonServer, post: Post, answers: tuple[Any, ...]
) -> None:
    texts = [answer.text for answer in answers]
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "parameters": SAMPLING}
    status, answer = post(demo_server, "models/octavo/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, texts)
    status, events = post(demo_server, "models/octavo/generate_stream", {**body, "stream": True})
    assert status == 200
    deltas = [json.loads(event[6:])["text_output"] for event in events.split("\n\n") if event]
    assert ["".join(column) for column in zip(*deltas, strict=True)] == texts


def test_stop_string_ends_its_own_answer_alone(
    demo_server: TritonServer, answers: tuple[Any, ...]
) -> None:
    first, second, third = (answer.text for answer in answers)
    stop = next(word for word in first.split() if word not in second and word not in third)
    for stream in (True, False):
        with Client(demo_server.grpc_url, timeout_s=60) as client:
            if stream:
                deltas = list(client.stream(PROMPT, **SAMPLING, stop=stop))
                texts = [
                    "".join(delta.text for delta in deltas if delta.index == index)
                    for index in range(3)
                ]
                reasons = [
                    [delta.finish_reason for delta in deltas if delta.index == index][-1]
                    for index in range(3)
                ]
                timing = deltas[-1].timing
            else:
                completion = client.generate(PROMPT, **SAMPLING, stop=stop)
                texts = [answer.text for answer in completion.answers]
                reasons = [answer.finish_reason for answer in completion.answers]
                timing = completion.timing
        assert texts == [first[: first.index(stop)], second, third]
        assert reasons == ["stop", "length", "length"]
        assert timing is not None
        assert timing.decode_ms > 0


def test_cancelling_gives_the_blocks_of_all_answers_back(
    tiny_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        stream = client.stream("a", n=4, max_tokens=30_000, ignore_eos=True)
        next(stream)
        assert become(lambda: metrics(tiny_server)["num_requests_running"] == 1)
        stream.close()
        assert become(lambda: metrics(tiny_server)["kv_blocks_used"] == 0)
