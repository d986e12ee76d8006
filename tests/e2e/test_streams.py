"""Many streams at once, and what the stock client sees of each."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient, Client

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]
Tokens = tuple[int, ...]

NUM_STREAMS = 64
SUBJECTS = ("capital of France", "boiling point of water", "moon", "history of tea")
PROMPTS = (
    *(f"The {subject} is" for subject in SUBJECTS),
    *(f"Write one line about the {subject}:" for subject in SUBJECTS),
    *(f"1, 2, 3, 4, {subject}, " * repeats for repeats in (2, 9) for subject in SUBJECTS[:2]),
)


def params(index: int) -> dict[str, Any]:
    """Return greedy parameters; lengths differ, so that streams leave at different steps."""
    return {"temperature": 0, "max_tokens": 4 + index % len(PROMPTS), "ignore_eos": True}


def prompt(index: int) -> str:
    return PROMPTS[index % len(PROMPTS)]


@pytest.fixture(scope="module")
def alone(demo_server: TritonServer) -> list[Tokens]:
    """Return the answer of each prompt when nothing else runs."""
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        answers = [client.generate(prompt(i), **params(i)) for i in range(len(PROMPTS))]
    assert len({answer.token_ids for answer in answers}) == len(PROMPTS), "too alike to tell apart"
    return [answer.token_ids for answer in answers]


def read_all(streams: list[Any]) -> list[Tokens]:
    return [tuple(token for delta in stream for token in delta.token_ids) for stream in streams]


def test_64_streams_with_a_connection_each_answer_as_each_alone(
    demo_server: TritonServer, alone: list[Tokens]
) -> None:
    clients = [Client(demo_server.grpc_url, timeout_s=120) for _ in range(NUM_STREAMS)]
    streams = [client.stream(prompt(i), **params(i)) for i, client in enumerate(clients)]
    answers = read_all(streams)
    for client in clients:
        client.close()
    assert answers == [alone[i % len(PROMPTS)] for i in range(NUM_STREAMS)]


def test_64_streams_over_one_connection_answer_as_each_alone(
    demo_server: TritonServer, alone: list[Tokens]
) -> None:
    with Client(demo_server.grpc_url, timeout_s=120) as client:
        answers = read_all([client.stream(prompt(i), **params(i)) for i in range(NUM_STREAMS)])
    assert answers == [alone[i % len(PROMPTS)] for i in range(NUM_STREAMS)]


def test_asyncio_streams_answer_as_each_alone(
    demo_server: TritonServer, alone: list[Tokens]
) -> None:
    async def run() -> list[Tokens]:
        async with AsyncClient(demo_server.grpc_url, timeout_s=60) as client:
            jobs = [client.generate(prompt(i), **params(i)) for i in range(len(PROMPTS))]
            return [answer.token_ids for answer in await asyncio.gather(*jobs)]

    assert asyncio.run(run()) == alone


def test_stock_client_gets_the_final_flag_once_and_on_the_last_data(
    tiny_server: TritonServer, exchange: OpenExchange
) -> None:
    sampling = '{"max_tokens": 20, "seed": 5, "ignore_eos": true}'
    answers = defaultdict(list)
    with exchange(tiny_server) as stream:
        for index in range(6):
            tensors = {"text_input": "abc", "stream": index % 2 == 0, "return_finish_reason": True}
            stream.send({**tensors, "sampling_parameters": sampling}, request_id=str(index))
        while sum(responses[-1].is_final for responses in answers.values()) < 6:
            response = stream.receive()
            answers[response.request_id].append(response)
        assert stream.finish() == 0, "something came after the last final flag"
    for index, responses in answers.items():
        assert [response.is_final for response in responses].count(True) == 1
        assert responses[-1].is_final
        assert all(response.text for response in responses[:-1])
        reasons = [response.outputs["finish_reason"] for response in responses]
        assert reasons == [[""]] * (len(responses) - 1) + [["length"]]
        assert (len(responses) > 1) is (int(index) % 2 == 0), "only streams come in parts"


def test_outputs_are_those_asked_for(tiny_server: TritonServer, exchange: OpenExchange) -> None:
    asked = ("finish_reason", "token_ids", "num_input_tokens", "num_output_tokens")
    flags = {f"return_{name}": True for name in asked}
    tensors = {"input_ids": [5, 6, 7], "sampling_parameters": '{"max_tokens": 3}'}
    with exchange(tiny_server) as stream:
        stream.send(tensors)
        (plain,) = stream.receive_all()
        stream.send({**tensors, **flags, "return_timing": False})
        (full,) = stream.receive_all()
    assert set(plain.outputs) == {"text_output"}
    assert set(full.outputs) == {"text_output", *asked}
    assert full.outputs["num_input_tokens"] == [3]
    assert full.outputs["num_output_tokens"] == [len(full.outputs["token_ids"])] == [3]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("exclude", [None, False, True])
def test_prompt_stands_before_the_answer_by_default_unless_streaming(
    tiny_server: TritonServer, exchange: OpenExchange, streaming: bool, exclude: bool | None
) -> None:
    tensors = {"text_input": "prömpt ", "sampling_parameters": '{"max_tokens": 4, "seed": 1}'}
    flag = {} if exclude is None else {"exclude_input_in_output": exclude}
    with exchange(tiny_server) as stream:
        stream.send({**tensors, "stream": streaming, **flag})
        text = "".join(response.text for response in stream.receive_all())
    excluded = streaming if exclude is None else exclude
    assert text.startswith("prömpt ") is not excluded
