from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.errors import (
    EngineDead,
    EngineError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
)
from octavo.request import FinishReason, SequenceTiming
from octavo.scheduling_params import SchedulingParams
from octavo.triton_model import codec
from octavo.triton_model.codec import decode_request
from octavo.triton_model.exchange import AnswerData, DecodedRequest, ResponseData

VOCAB_SIZE = 1000
MAX_BYTES = 100_000


@pytest.fixture
def decode(make_request: Callable[..., Any]) -> Callable[..., DecodedRequest]:
    return lambda **request: decode_request(make_request(**request), VOCAB_SIZE, MAX_BYTES)


@pytest.fixture
def refusal(decode: Callable[..., DecodedRequest]) -> Callable[..., str]:
    """Return the message that a request is refused with."""

    def refuse(**request: Any) -> str:
        with pytest.raises(InvalidRequest) as caught:
            decode(**request)
        return str(caught.value)

    return refuse


def test_text_comes_out_as_it_went_in(decode: Callable[..., DecodedRequest]) -> None:
    text = "héllo 你好 👩‍👩‍👧\0\n"
    decoded = decode(text_input=text)
    assert decoded.text == text
    assert decoded.token_ids is decoded.messages is None
    assert decoded.prompt_length == len(text)


def test_token_ids_come_out_as_they_went_in(decode: Callable[..., DecodedRequest]) -> None:
    decoded = decode(input_ids=[0, 999, 3])
    assert decoded.token_ids == (0, 999, 3)
    assert decoded.prompt_length == 3


def test_messages_are_decoded_but_not_judged(decode: Callable[..., DecodedRequest]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert decode(messages=json.dumps(messages)).messages == messages


def test_defaults_are_those_of_the_vllm_backend(decode: Callable[..., DecodedRequest]) -> None:
    options = decode(text_input="a").options
    assert options.stream is False
    assert options.include_prompt is True
    assert options.outputs == frozenset()


@pytest.mark.parametrize(
    ("flags", "include_prompt"),
    [
        ({}, True),
        ({"stream": True}, False),
        ({"stream": True, "exclude_input_in_output": False}, True),
        ({"exclude_input_in_output": True}, False),
    ],
)
def test_the_prompt_is_echoed_unless_streamed_or_excluded(
    decode: Callable[..., DecodedRequest], flags: dict[str, bool], include_prompt: bool
) -> None:
    assert decode(text_input="a", **flags).options.include_prompt is include_prompt


def test_flags_ask_for_the_output_of_their_name(decode: Callable[..., DecodedRequest]) -> None:
    flags = {"return_token_ids": True, "return_finish_reason": True, "return_timing": False}
    assert decode(text_input="a", **flags).options.outputs == {"token_ids", "finish_reason"}


def test_sampling_parameters_are_read_from_their_tensor(
    decode: Callable[..., DecodedRequest],
) -> None:
    text = json.dumps({"temperature": "0.5", "max_tokens": "7", "stop": ["x", "y"]})
    params = decode(text_input="a", sampling_parameters=text).params
    assert (params.temperature, params.max_tokens, params.stop) == (0.5, 7, ("x", "y"))


def test_without_that_tensor_the_requests_own_parameters_are_read(
    decode: Callable[..., DecodedRequest],
) -> None:
    parameters = {"max_tokens": 3, "stop": "x", "ignore_eos": True}
    params = decode(text_input="a", parameters=parameters).params
    assert (params.max_tokens, params.stop, params.ignore_eos) == (3, ("x",), True)


def test_with_that_tensor_they_are_not(decode: Callable[..., DecodedRequest]) -> None:
    decoded = decode(text_input="a", sampling_parameters="{}", parameters={"max_tokens": 3})
    assert decoded.params.max_tokens is None


KEYS = {"priority": "-2", "deadline_ms": 500, "tenant": "gold", "cache_salt": "s"}


@pytest.mark.parametrize(
    "request_",
    [
        {"sampling_parameters": json.dumps({"temperature": 0, **KEYS})},
        {"parameters": {"temperature": 0, **KEYS}},
        {"sampling_parameters": '{"temperature": 0}', "parameters": KEYS},
        {
            "sampling_parameters": '{"temperature": 0, "tenant": "gold", "priority": null}',
            "parameters": KEYS | {"tenant": "another"},
        },
    ],
    ids=["tensor", "parameters", "parameters beside the tensor", "tensor before parameters"],
)
def test_scheduling_keys_are_read_wherever_they_stand(
    decode: Callable[..., DecodedRequest], request_: dict[str, Any]
) -> None:
    decoded = decode(text_input="a", **request_)
    assert decoded.scheduling == SchedulingParams(-2, 500.0, "gold", "s")
    assert decoded.params.temperature == 0.0


@pytest.mark.parametrize(
    ("request_", "deadline_ms"),
    [
        ({}, None),
        ({"parameters": {"timeout": 0}}, None),
        ({"timeout_us": 1500}, 1.5),
        ({"parameters": {"timeout": "2500"}}, 2.5),
        ({"timeout_us": 1500, "parameters": {"timeout": 2500, "deadline_ms": 9}}, 1.5),
        ({"timeout_us": 1500, "sampling_parameters": '{"deadline_ms": 1}'}, 1.0),
        ({"parameters": {"timeout": 500}, "sampling_parameters": '{"deadline_ms": 1}'}, 0.5),
    ],
)
def test_the_protocols_timeout_is_a_deadline_and_the_earliest_counts(
    decode: Callable[..., DecodedRequest], request_: dict[str, Any], deadline_ms: float | None
) -> None:
    assert decode(text_input="a", **request_).scheduling.deadline_ms == deadline_ms


def test_parameters_that_are_not_utf_8_are_the_clients_fault(
    make_request: Callable[..., Any],
) -> None:
    class Garbled(type(make_request())):  # type: ignore[misc]
        def parameters(self) -> str:
            return b'{"tenant": "\xff"}'.decode()

    message = "^the request's parameters have byte 0xff but must be valid UTF-8$"
    with pytest.raises(InvalidRequest, match=message):
        decode_request(Garbled(text_input="a"), VOCAB_SIZE, MAX_BYTES)


def test_what_the_protocol_leaves_in_the_parameters_is_no_error(
    decode: Callable[..., DecodedRequest],
) -> None:
    leftovers = {
        "triton_enable_empty_final_response": True,
        "id": "mine",
        "sequence_id": 4,
        "sequence_start": True,
        "sequence_end": False,
        "binary_data_output": True,
        "headers": "x",
    }
    assert decode(text_input="a", parameters=leftovers).params.max_tokens is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "the request has no prompt but must have one of text_input, input_ids, messages"),
        (
            {"text_input": "a", "messages": "[]"},
            "the request has text_input and messages but must have one of "
            "text_input, input_ids, messages",
        ),
        ({"text_input": ""}, "text_input is empty but must have at least one character"),
        ({"text_input": ["a", "b"]}, "text_input has shape [2] but must have shape [1]"),
        (
            {"text_input": np.array([[b"a"]], np.object_)},
            "text_input has shape [1, 1] but must have shape [1]",
        ),
        (
            {"text_input": np.array([], np.object_)},
            "text_input has shape [0] but must have shape [1]",
        ),
        (
            {"text_input": b"ab\xff\xfe"},
            "text_input has byte 0xff at position 2 but must be valid UTF-8",
        ),
        (
            {"text_input": b"\xed\xa0\x80"},
            "text_input has byte 0xed at position 0 but must be valid UTF-8",
        ),
        (
            {"input_ids": np.array([], np.int32)},
            "input_ids has shape [0] but must have shape [n] with n of at least 1",
        ),
        (
            {"input_ids": np.array([[1, 2]], np.int32)},
            "input_ids has shape [1, 2] but must have shape [n] with n of at least 1",
        ),
        (
            {"input_ids": [1, -1]},
            "input_ids has -1 at position 1 but token ids are 0 to 999",
        ),
        (
            {"input_ids": [1000]},
            "input_ids has 1000 at position 0 but token ids are 0 to 999",
        ),
        ({"messages": "[{"}, "messages is not valid JSON: "),
        ({"messages": "[" * 100_000}, "messages is not valid JSON: "),
        (
            {"text_input": "a", "stream": [True, False]},
            "stream has shape [2] but must have shape [1]",
        ),
        (
            {"text_input": "a", "return_prompt_logprobs": [True, True]},
            "return_prompt_logprobs has shape [2] but must have shape [1]",
        ),
        (
            {"text_input": "a", "sampling_parameters": "{'a'}"},
            "sampling_parameters is not valid JSON: ",
        ),
        (
            {"text_input": "a", "sampling_parameters": "[]"},
            "sampling_parameters must be a JSON object, not list",
        ),
        (
            {"text_input": "a", "sampling_parameters": '{"tempreature": 1}'},
            "unknown sampling parameter 'tempreature'; did you mean 'temperature'?",
        ),
        (
            {"text_input": "a", "sampling_parameters": '{"n": 0}'},
            "n is 0 but must be an integer from 1 to 128",
        ),
        (
            {"text_input": "a", "parameters": {"max_tokenz": 1}},
            "unknown sampling parameter 'max_tokenz'; did you mean 'max_tokens'?",
        ),
        (
            {"text_input": "a", "sampling_parameters": '{"priorty": 1}'},
            "unknown sampling parameter 'priorty'; did you mean 'priority'?",
        ),
        (
            {"text_input": "a", "sampling_parameters": '{"deadline_ms": 0}'},
            "deadline_ms is 0.0 but must be a number of milliseconds in (0, 1,000,000,000,000]",
        ),
        (
            {"text_input": "a", "parameters": {"priority": "high"}},
            "priority is 'high' but must be an integer",
        ),
        (
            {"text_input": "a", "sampling_parameters": "{}", "parameters": {"tenant": 5}},
            "tenant is 5 but must be a string",
        ),
        (
            {"text_input": "a", "parameters": {"timeout": -1}},
            "timeout is -1 but must be microseconds from 0 (none) to 9,223,372,036,854,775,807",
        ),
        (
            {"text_input": "a", "parameters": {"timeout": "soon"}},
            "timeout is 'soon' but must be an integer",
        ),
    ],
)
def test_a_wrong_request_is_refused_by_name_value_and_what_is_allowed(
    refusal: Callable[..., str], request_: dict[str, Any], message: str
) -> None:
    assert refusal(**request_).startswith(message)


def test_a_response_has_the_text_and_what_was_asked_for(pb_utils: Any) -> None:
    timing = SequenceTiming(0.0012345, 0.25, 1.0, 0.0, num_cached_tokens=6, num_preemptions=2)
    answers = (AnswerData("é👍", (4, 5), FinishReason.LENGTH), AnswerData("", (6,)))
    data = ResponseData(answers, 9, timing)
    every = frozenset(["finish_reason", "token_ids", "num_input_tokens", "num_output_tokens"])
    response = codec.encode_response(pb_utils, data, every)
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "text_output": ["é👍".encode(), b""],
        "finish_reason": [b"length", b""],
        "token_ids": [4, 5, 6],
        "num_input_tokens": [9],
        "num_output_tokens": [2, 1],
        "timing": [
            b'{"queue_ms": 1.234, "prefill_ms": 250.0, "decode_ms": 1000.0, "preempted_ms": 0.0, '
            b'"cached_tokens": 6, "preemptions": 2}'
        ],
    }
    declared = {spec.name: spec.data_type for spec in codec.OUTPUTS}
    numpy_types = {"O": "TYPE_STRING", "int32": "TYPE_INT32", "uint32": "TYPE_UINT32"}
    for name, array in arrays.items():
        assert numpy_types.get(array.dtype.name, "TYPE_STRING") == declared[name]


def test_log_probabilities_are_a_list_for_each_answer_and_one_for_the_prompt(pb_utils: Any) -> None:
    answers = (
        AnswerData("a", (4, 5), None, ("{4}", "{5}"), -1.25),
        AnswerData("", (), FinishReason.STOP, (), -2.5),
    )
    data = ResponseData(answers, 9, prompt_logprobs=("null", "{7}"))
    outputs = frozenset(["logprobs", "cumulative_logprob", "prompt_logprobs"])
    response = codec.encode_response(pb_utils, data, outputs)
    assert {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors} == {
        "text_output": [b"a", b""],
        "cumulative_logprob": [-1.25, -2.5],
        "logprobs": [b"[{4}, {5}]", b"[]"],
        "prompt_logprobs": [b"[null, {7}]"],
    }
    later = codec.encode_response(pb_utils, ResponseData(answers, 9), frozenset())
    assert [tensor.name() for tensor in later.output_tensors] == ["text_output"]


def test_a_response_that_is_not_the_last_has_an_empty_finish_reason(pb_utils: Any) -> None:
    data = ResponseData((AnswerData("a", (1,)),), 1)
    response = codec.encode_response(pb_utils, data, frozenset(["finish_reason"]))
    assert [tensor.name() for tensor in response.output_tensors] == ["text_output", "finish_reason"]
    assert response.output("finish_reason") == ""
    assert not data.is_final


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), "INVALID_ARG"),
        (QueueFull("x"), "UNAVAILABLE"),
        (EngineDead("x"), "UNAVAILABLE"),
        (RequestCancelled("x"), "CANCELLED"),
        (EngineError("x"), "INTERNAL"),
        (ValueError("x"), "INTERNAL"),
    ],
)
def test_every_error_has_a_code(pb_utils: Any, error: Exception, code: str) -> None:
    response = codec.encode_error(pb_utils, error)
    assert (response.error.code, response.error.message) == (code, f"{code}: x")
    assert response.output_tensors == []


def test_an_error_message_is_bounded_and_valid_unicode(pb_utils: Any) -> None:
    error = codec.encode_error(pb_utils, InvalidRequest("\ud800" + "x" * 10_000)).error
    assert error.message == "INVALID_ARG: ?" + "x" * (2000 - 14)


class _Config:
    """Triton's configuration object, as far as it is used."""

    def __init__(self, **config: Any) -> None:
        self.config: dict[str, Any] = {"input": [], "output": [], **config}

    def as_dict(self) -> dict[str, Any]:
        return self.config

    def set_max_batch_size(self, size: int) -> None:
        self.config["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.config["policy"] = policy

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor)

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        for given in self.config[kind]:
            if given["name"] == tensor["name"]:
                given.update(tensor)
                return
        self.config[kind].append(tensor)


CONTRACT_INPUTS = """text_input input_ids messages stream sampling_parameters
    exclude_input_in_output return_finish_reason return_cumulative_logprob return_logprobs
    return_num_input_tokens return_num_output_tokens return_token_ids return_timing
    return_prompt_logprobs""".split()
CONTRACT_OUTPUTS = """text_output finish_reason cumulative_logprob logprobs token_ids
    num_input_tokens num_output_tokens timing prompt_logprobs""".split()


def test_the_completed_configuration_names_every_tensor_of_the_contract() -> None:
    config = _Config()
    codec.complete_config(config)
    assert config.config["max_batch_size"] == 0
    assert config.config["policy"] == {"decoupled": True}
    assert [tensor["name"] for tensor in config.config["input"]] == CONTRACT_INPUTS
    assert all(tensor["optional"] for tensor in config.config["input"])
    assert [tensor["name"] for tensor in config.config["output"]] == CONTRACT_OUTPUTS


def test_a_tensor_that_config_pbtxt_requires_stays_required() -> None:
    given = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
    config = _Config(input=[given])
    codec.complete_config(config)
    assert [t["name"] for t in config.config["input"] if not t["optional"]] == ["text_input"]


@pytest.mark.parametrize(
    ("name", "largest", "larger", "num_bytes"),
    [
        ("text_input", "é" * 50_000, "é" * 50_001, "100,002"),
        ("input_ids", [1] * 25_000, [1] * 25_001, "100,004"),
        ("messages", '["' + "a" * 99_996 + '"]', '["' + "a" * 99_997 + '"]', "100,001"),
    ],
)
def test_a_prompt_has_so_many_bytes_at_most(
    name: str,
    largest: Any,
    larger: Any,
    num_bytes: str,
    decode: Callable[..., DecodedRequest],
) -> None:
    assert decode(**{name: largest}).prompt_length >= 25_000
    with pytest.raises(PromptTooLong) as refused:
        decode(**{name: larger})
    assert str(refused.value) == (
        f"{name} has {num_bytes} bytes but max_prompt_bytes is 100,000; "
        "shorten it or raise max_prompt_bytes in engine.json"
    )
