"""Log-probabilities of tokens and prompts, as our client, the stock client and HTTP see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]
Post = Callable[..., tuple[int, str]]

PROMPT = "The capital of France is"
SAMPLING = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
FLAGS = {"return_logprobs": True, "return_cumulative_logprob": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def whole(demo_server: TritonServer) -> Any:
    """Return what our client reads of one answer that does not stream."""
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        return client.generate(PROMPT, **SAMPLING, logprobs=2, prompt_logprobs=1)


def test_tokens_of_a_greedy_answer_are_the_likeliest_and_the_sum_adds_up(whole: Any) -> None:
    assert [own.token_id for own, *_ in whole.logprobs] == list(whole.token_ids)
    for own, *others in whole.logprobs:
        assert (own.rank, [each.rank for each in others]) == (1, [2])
        assert 0.0 >= own.logprob >= others[0].logprob
    assert "".join(own.token for own, *_ in whole.logprobs) == whole.text
    total = np.float32(sum(own.logprob for own, *_ in whole.logprobs))
    assert whole.cumulative_logprob == total


def test_a_prompt_is_told_of_itself_each_time_with_the_same_bits(
    demo_server: TritonServer, whole: Any
) -> None:
    first, *places = whole.prompt_logprobs
    assert first is None
    assert "".join(own.token for own, *_ in places) == " capital of France is"
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        again = client.generate(PROMPT, **SAMPLING, logprobs=2, prompt_logprobs=1)
        assert again == whole
        plain = client.generate(PROMPT, **SAMPLING)
    assert plain.token_ids == whole.token_ids
    assert plain.prompt_logprobs is None
    assert plain.logprobs == ()


def test_deltas_carry_those_of_their_tokens(demo_server: TritonServer, whole: Any) -> None:
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        deltas = list(client.stream(PROMPT, **SAMPLING, logprobs=2, prompt_logprobs=1))
    assert len(deltas) > 1
    assert tuple(each for delta in deltas for each in delta.logprobs) == whole.logprobs
    assert all(len(delta.logprobs) == delta.num_output_tokens for delta in deltas)
    assert deltas[-1].cumulative_logprob == whole.cumulative_logprob
    assert deltas[0].prompt_logprobs == whole.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_a_stop_string_cuts_them_with_the_tokens(demo_server: TritonServer, whole: Any) -> None:
    stop = whole.logprobs[3][0].token
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        answer = client.generate(PROMPT, **SAMPLING, logprobs=2, stop=stop)
    assert answer.finish_reason == "stop"
    assert answer.logprobs == whole.logprobs[: len(answer.token_ids)]


def test_the_stock_client_reads_json_as_of_the_vllm_backend(
    demo_server: TritonServer, exchange: OpenExchange, whole: Any
) -> None:
    sampling = {key: str(value) for key, value in {**SAMPLING, "logprobs": 2}.items()}
    with exchange(demo_server) as stream:
        stream.send({"text_input": PROMPT, "sampling_parameters": json.dumps(sampling), **FLAGS})
        (response,) = stream.receive_all()
    (text,) = response.outputs["logprobs"]
    entries = json.loads(text)
    assert [int(next(iter(entry))) for entry in entries] == response.outputs["token_ids"]
    assert entries == [
        {
            str(each.token_id): {
                "logprob": each.logprob,
                "rank": each.rank,
                "decoded_token": each.token,
            }
            for each in place
        }
        for place in whole.logprobs
    ]
    assert response.outputs["cumulative_logprob"] == [whole.cumulative_logprob]


def test_http_gives_the_same(demo_server: TritonServer, post: Post, whole: Any) -> None:
    body = {
        "text_input": PROMPT,
        "parameters": {**SAMPLING, "logprobs": 2, "prompt_logprobs": 1},
        "return_prompt_logprobs": True,
        **FLAGS,
    }
    status, answer = post(demo_server, "models/octavo/generate", body)
    assert status == 200
    outputs = json.loads(answer)
    assert len(json.loads(outputs["logprobs"])) == SAMPLING["max_tokens"]
    assert json.loads(outputs["prompt_logprobs"])[0] is None
    assert len(json.loads(outputs["prompt_logprobs"])) == whole.num_input_tokens
    assert outputs["cumulative_logprob"] == pytest.approx(whole.cumulative_logprob, rel=1e-6)


@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_more_than_the_engine_reports_are_refused(demo_server: TritonServer, key: str) -> None:
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        with pytest.raises(InvalidRequest, match=rf"^{key} is 21 but must be .* 0 to 20"):
            client.generate(PROMPT, **SAMPLING, **{key: 21})
        assert client.generate(PROMPT, **SAMPLING, **{key: 20}).num_output_tokens == 8
