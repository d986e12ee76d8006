"""Every key and tensor of the interface through the real server, by gRPC and by HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from octavo.local.demo_model import demo_checkpoint
from octavo.local.triton_server import TritonServer
from octavo.sampling_params import SamplingParams
from octavo.scheduling_params import SCHEDULING_KEYS
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.codec import INPUTS, OUTPUTS

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]
Post = Callable[..., tuple[int, str]]
Ask = Callable[..., dict[str, list[Any]]]

PROMPT = "1, 2, 3, 4, 5,"
PLAIN = " 6, 7, 8"
LONGER = " 6, 7, 8, 9, 10, 11,"
GREEDY = {"temperature": 0, "max_tokens": 8}
#: By the tokenizer of the demo model.
COMMA, END = 28, 2
END_TEXT = "<|im_end|>"
FLAGS = {spec.name: True for spec in INPUTS if spec.name.startswith("return_")}

#: By key: parameters beside `GREEDY`, and the texts of the answers; None: not all are the usual.
KEYS: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    "n": ({"n": 2}, [PLAIN, PLAIN]),
    "beam_width": ({"beam_width": 3, "n": 2, "max_tokens": 6}, None),
    "length_penalty": ({"beam_width": 3, "length_penalty": 0.5}, [PLAIN]),
    "temperature": ({"temperature": 1.5, "seed": 7}, None),
    "top_k": ({"temperature": 9.5, "top_k": 1}, [PLAIN]),
    "top_p": ({"temperature": 0.5, "top_p": 0.000001}, [PLAIN]),
    "min_p": ({"temperature": 0.5, "min_p": 1}, [PLAIN]),
    "seed": ({"temperature": 9.5, "seed": -(2**63), "n": 2}, None),
    "max_tokens": ({"max_tokens": 3}, [" 6,"]),
    "min_tokens": ({"min_tokens": 6, "stop": ","}, [" 6, 7"]),
    "stop": ({"stop": ["no match", ", 7"]}, [" 6"]),
    "stop_token_ids": ({"stop_token_ids": [COMMA]}, [" 6"]),
    "include_stop_str_in_output": ({"stop": ",", "include_stop_str_in_output": True}, [" 6,"]),
    "ignore_eos": ({"logit_bias": {END: 100}, "ignore_eos": True}, [""]),
    "skip_special_tokens": (
        {"logit_bias": {END: 100}, "ignore_eos": True, "skip_special_tokens": False},
        [END_TEXT * 8],
    ),
    "spaces_between_special_tokens": (
        {
            "logit_bias": {END: 100},
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        [END_TEXT * 8],
    ),
    "repetition_penalty": ({"repetition_penalty": 1.9}, None),
    "presence_penalty": ({"presence_penalty": 2, "max_tokens": 20}, None),
    "frequency_penalty": ({"frequency_penalty": 2, "max_tokens": 20}, None),
    "logit_bias": ({"logit_bias": {COMMA: 100}}, ["," * 8]),
    "allowed_token_ids": ({"allowed_token_ids": [COMMA]}, ["," * 8]),
    "bad_words": ({"bad_words": ["6", "7"], "max_tokens": 2}, None),
    "logprobs": ({"logprobs": 2}, [PLAIN]),
    "prompt_logprobs": ({"prompt_logprobs": 1}, [PLAIN]),
    "structured_outputs": ({"structured_outputs": {"choice": ["seven"]}}, ["seven"]),
    "lora_name": ({"lora_name": "other words"}, None),
    "priority": ({"priority": -1}, [PLAIN]),
    "deadline_ms": ({"deadline_ms": 50_000}, [PLAIN]),
    "tenant": ({"tenant": "a"}, [PLAIN]),
    "cache_salt": ({"cache_salt": "b"}, [PLAIN]),
}


@pytest.fixture
def by_grpc(demo_server: TritonServer, exchange: OpenExchange) -> Ask:
    """Return a function that asks by the stock client and gives all outputs."""

    def ask(prompt: dict[str, Any], params: dict[str, Any]) -> dict[str, list[Any]]:
        tensors = {"exclude_input_in_output": True, "sampling_parameters": json.dumps(params)}
        with exchange(demo_server) as stream:
            stream.send({**prompt, **tensors, **FLAGS})
            (response,) = stream.receive_all()
        return dict(response.outputs)

    return ask


@pytest.fixture
def by_http(demo_server: TritonServer, post: Post) -> Ask:
    """Return a function that posts all values as strings and gives all outputs."""

    def ask(prompt: dict[str, Any], params: dict[str, Any]) -> dict[str, list[Any]]:
        texts = {key: _as_text(value) for key, value in params.items()}
        # The parameters of a request hold no lists.
        given = {"sampling_parameters": json.dumps(texts)} if _lists(texts) else texts
        body = {**prompt, "exclude_input_in_output": True, **given, **FLAGS}
        status, answer = post(demo_server, "models/octavo/generate", body)
        assert status == 200, answer
        outputs = {spec.name: json.loads(answer)[spec.name] for spec in OUTPUTS}
        return {name: v if isinstance(v, list) else [v] for name, v in outputs.items()}

    return ask


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return value
    return value if isinstance(value, str) else json.dumps(value)


def _lists(values: dict[str, Any]) -> bool:
    return any(isinstance(value, list) for value in values.values())


def _assert_same(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    """Compare all but what time has its part in, and sums to what JSON shows of them."""
    own = ("timing", "cumulative_logprob")
    assert {k: v for k, v in one.items() if k not in own} == {
        k: v for k, v in other.items() if k not in own
    }
    assert one["cumulative_logprob"] == pytest.approx(other["cumulative_logprob"], rel=1e-6)


def test_every_key_is_asked_for() -> None:
    assert set(KEYS) == {*(field.name for field in fields(SamplingParams)), *SCHEDULING_KEYS}
    assert all(key in params for key, (params, _) in KEYS.items())


@pytest.mark.parametrize("key", KEYS)
def test_a_key_does_the_same_by_grpc_and_as_a_string_by_http(
    key: str, by_grpc: Ask, by_http: Ask
) -> None:
    params, texts = KEYS[key]
    answers = by_grpc({"text_input": PROMPT}, {**GREEDY, **params})
    assert set(answers) == {spec.name for spec in OUTPUTS}
    if texts is None:
        assert not all(LONGER.startswith(text) for text in answers["text_output"])
    else:
        assert answers["text_output"] == texts
    _assert_same(answers, by_http({"text_input": PROMPT}, {**GREEDY, **params}))


def test_each_kind_of_prompt_is_read_the_same_by_grpc_and_http(by_grpc: Ask, by_http: Ask) -> None:
    token_ids = Tokenizer.load(str(demo_checkpoint())).encode(PROMPT)
    chat = json.dumps([{"role": "user", "content": "Count."}])
    prompts = ({"text_input": PROMPT}, {"input_ids": token_ids}, {"messages": chat})
    text, ids, messages = (by_grpc(prompt, GREEDY) for prompt in prompts)
    assert text["text_output"] == [PLAIN]
    _assert_same(ids, text)
    assert messages["num_input_tokens"] != text["num_input_tokens"]
    for prompt, answer in zip(prompts, (text, ids, messages), strict=True):
        _assert_same(by_http(prompt, GREEDY), answer)
