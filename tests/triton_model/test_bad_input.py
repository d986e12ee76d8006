"""Every kind of wrong request, through decoding and admission: one refusal each, and a stream
beside it does not notice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.prompt_threads import HUGE_PROMPT, LONG_PROMPT
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
MakeRequest = Callable[..., Any]

INT = "an integer"
NUMBER = "a number"
BOOLEAN = "true or false"
POSITIVE = "an integer from 1 to 2,147,483,647"
TEMPERATURE = "a number in [0, 1,000,000]"
TOP_K = f"-1 or 0 (all) or {POSITIVE}"
STRINGS = "a string or a list of strings"
FORMS = "json, regex, choice, grammar, json_object"

#: JSON of a key's value, and what the message says of it.
KEYS: dict[str, list[tuple[str, str]]] = {
    "n": [
        ("0", "n is 0 but must be an integer from 1 to 128"),
        ("1e3", "n is 1000 but must be an integer from 1 to 128"),
        ('"three"', f"n is 'three' but must be {INT}"),
        ("[1]", f"n is [1] but must be {INT}"),
    ],
    "beam_width": [("65", "beam_width is 65 but must be an integer from 1 to 64")],
    "length_penalty": [
        ("11", "length_penalty is 11.0 but must be a number in [-10, 10]"),
        ("2", "length_penalty is 2.0 but must be 1 where beam_width is 1"),
    ],
    "temperature": [
        ("NaN", f"temperature is nan but must be {TEMPERATURE}"),
        ("-Infinity", f"temperature is -inf but must be {TEMPERATURE}"),
        ('"inf"', f"temperature is inf but must be {TEMPERATURE}"),
        ("1e999", f"temperature is inf but must be {TEMPERATURE}"),
        ('"1,5"', f"temperature is '1,5' but must be {NUMBER}"),
        ("{}", f"temperature is {{}} but must be {NUMBER}"),
    ],
    "top_k": [
        ("-2", f"top_k is -2 but must be {TOP_K}"),
        ("4e9", f"top_k is 4000000000 but must be {TOP_K}"),
        ("NaN", f"top_k is nan but must be {INT}"),
        ('"0x10"', f"top_k is '0x10' but must be {INT}"),
    ],
    "top_p": [
        ("0", "top_p is 0.0 but must be a number in (0, 1]"),
        ("NaN", "top_p is nan but must be a number in (0, 1]"),
    ],
    "min_p": [("1.01", "min_p is 1.01 but must be a number in [0, 1]")],
    "seed": [
        ("1e400", f"seed is inf but must be {INT}"),
        (str(2**63), f"seed is {2**63} but must be a signed 64-bit integer"),
    ],
    "max_tokens": [
        ("0", f"max_tokens is 0 but must be {POSITIVE}"),
        ('"0"', f"max_tokens is 0 but must be {POSITIVE}"),
        ("true", f"max_tokens is True but must be {INT}"),
    ],
    "min_tokens": [("-1", "min_tokens is -1 but must be an integer in [0, 2,147,483,647]")],
    "stop": [
        ("7", f"stop is 7 but must be {STRINGS}"),
        ('["a", ["b"]]', f"stop is ['a', ['b']] but must be {STRINGS}"),
        ('["a", ""]', "stop has an empty string but each must have a character"),
        (json.dumps([str(i) for i in range(10_000)]), "stop has 10,000 strings but at most 256"),
        (json.dumps("x" * 20_000), "stop has 20,000 characters in all but at most 16,384"),
    ],
    "stop_token_ids": [
        ("300", "stop_token_ids has 300 but token ids are 0 to 299"),
        ("[-1]", "stop_token_ids is -1 but must be token ids in [0, 2,147,483,647]"),
        ('["a"]', f"stop_token_ids is 'a' but must be {INT}"),
        (json.dumps([*range(257)]), "stop_token_ids has 257 ids but at most 256 are allowed"),
    ],
    "repetition_penalty": [
        ("0", "repetition_penalty is 0.0 but must be a number in [0.000001, 1,000,000]"),
        ("Infinity", "repetition_penalty is inf but must be a number in [0.000001, 1,000,000]"),
    ],
    "presence_penalty": [('"-3"', "presence_penalty is -3.0 but must be a number in [-2, 2]")],
    "frequency_penalty": [("NaN", "frequency_penalty is nan but must be a number in [-2, 2]")],
    "logit_bias": [
        ("[[1, 2]]", "logit_bias is [[1, 2]] but must be an object of token ids and biases"),
        ('{"300": 1}', "logit_bias has 300 but token ids are 0 to 299"),
        ('{"the": 1}', f"logit_bias: a token id is 'the' but must be {INT}"),
        ('{"5": -Infinity}', "logit_bias has -inf for 5 but must have numbers in [-100, 100]"),
    ],
    "allowed_token_ids": [
        ("[]", "allowed_token_ids has 0 ids but must have at least 1"),
        ("[1, 300]", "allowed_token_ids has 300 but token ids are 0 to 299"),
    ],
    "bad_words": [
        ("3", f"bad_words is 3 but must be {STRINGS}"),
        ('["a", ""]', "bad_words has an empty string but each must have a character"),
        ('"\\ud83d"', "bad_words has '\\ud83d', which this model cannot spell"),
    ],
    "ignore_eos": [('"maybe"', f"ignore_eos is 'maybe' but must be {BOOLEAN}")],
    "include_stop_str_in_output": [("2", f"include_stop_str_in_output is 2 but must be {BOOLEAN}")],
    "skip_special_tokens": [("[]", f"skip_special_tokens is [] but must be {BOOLEAN}")],
    "spaces_between_special_tokens": [
        ("0.5", f"spaces_between_special_tokens is 0.5 but must be {BOOLEAN}")
    ],
    "priority": [("1.5", f"priority is 1.5 but must be {INT}")],
    "deadline_ms": [("NaN", "deadline_ms is nan but must be a number of milliseconds in (0, 1,0")],
    "tenant": [("{}", "tenant is {} but must be a string")],
    "cache_salt": [(json.dumps("x" * 257), "cache_salt has 257 characters but must have at most")],
    "temprature": [("1", "unknown sampling parameter 'temprature'; did you mean 'temperature'?")],
    "Max_Tokens": [("null", "unknown sampling parameter 'Max_Tokens'; did you mean 'max_tokens'?")],
    "qqqq": [("1", "unknown sampling parameter 'qqqq' (known: allowed_token_ids, bad_words, ")],
    "structured_outputs": [
        ("5", f"structured_outputs is 5 but must be an object with one of {FORMS}"),
        ('"{}"', f"structured_outputs has none of them but must have one of {FORMS}"),
        ('{"regx": "a"}', f"structured_outputs has key 'regx' but allowed are {FORMS}"),
        ('{"choice": []}', "structured_outputs.choice is [] but must be a list of at least one"),
        ('{"json": "{"}', "structured_outputs.json is not valid JSON: "),
    ],
    "logprobs": [
        ("21", "logprobs is 21 but must be an integer from 0 to 20 (max_logprobs)"),
        ("-1", "logprobs is -1 but must be an integer of at least 0"),
        ('"many"', f"logprobs is 'many' but must be {INT}"),
    ],
    "prompt_logprobs": [
        ("21", "prompt_logprobs is 21 but must be an integer from 0 to 20 (max_logprobs)"),
        ("true", f"prompt_logprobs is True but must be {INT}"),
    ],
}
PARAMETERS = {
    "no JSON": ("{'n': 1}", "sampling_parameters is not valid JSON: Expecting property name"),
    "cut off": ('{"n": ', "sampling_parameters is not valid JSON: Expecting value"),
    "a list": ("[]", "sampling_parameters must be a JSON object, not list"),
    "not UTF-8": (b'{"n": "\xff"}', "sampling_parameters has byte 0xff at position 7 but must be"),
    "deep": ("[" * 100_000, "sampling_parameters is not valid JSON: maximum recursion depth"),
    "long": (
        '{"stop": "' + "x" * 2_097_152 + '"}',
        "sampling_parameters has 2,097,164 characters but must have at most 2,097,152",
    ),
    "of two": ([b"{}", b"{}"], "sampling_parameters has shape [2] but must have shape [1]"),
    "min above max": (
        '{"min_tokens": 3, "max_tokens": 2}',
        "min_tokens is 3 but must be an integer in [0, 2]",
    ),
    "n above beams": (
        '{"n": 3, "beam_width": 2}',
        "n is 3 but must be an integer from 1 to 2 (beam_width)",
    ),
    "beams with stop": (
        '{"stop": "END", "beam_width": 2}',
        "stop is ('END',) but must be absent where beam_width is above 1",
    ),
    "n above what runs": ('{"n": 65}', "n is 65 but max_num_seqs is 64; ask for fewer answers"),
}
PROMPTS = {
    "none": ({}, "the request has no prompt but must have one of text_input, input_ids, mess"),
    "two": ({"text_input": "a", "input_ids": [1]}, "the request has text_input and input_ids but"),
    "empty": ({"text_input": ""}, "text_input is empty but must have at least one character"),
    "not UTF-8": ({"text_input": b"\xc3("}, "text_input has byte 0xc3 at position 0 but must be"),
    "of rank 2": (
        {"text_input": np.array([[b"a"]], np.object_)},
        "text_input has shape [1, 1] but must have shape [1]",
    ),
    "too long": (
        {"text_input": "a" * 100_000},
        "prompt has 100,000 tokens but max_model_len is 100,000, with room for the answer; shorte",
    ),
    "far too long": (
        {"text_input": "a" * 8_000_000},
        "prompt has 8,000,000 characters but at most 1,048,576 can be 100,000 tokens, of which",
    ),
    "of too many bytes": (
        {"text_input": "é" * 5_000_000},
        "text_input has 10,000,000 bytes but max_prompt_bytes is 8,388,608; shorten it or raise",
    ),
    "too many messages": (
        {"messages": f"[{'0,' * 10_000}0]"},
        "messages has 10,001 items but at most 10,000 are allowed",
    ),
    "no ids": ({"input_ids": np.array([], np.int32)}, "input_ids has shape [0] but must have"),
    "ids of rank 2": ({"input_ids": np.array([[1]], np.int32)}, "input_ids has shape [1, 1] but"),
    "unknown id": ({"input_ids": [1, 300]}, "input_ids has 300 at position 1 but token ids are 0"),
    "negative id": ({"input_ids": [-(2**31)]}, "input_ids has -2147483648 at position 0 but tok"),
    "messages no JSON": ({"messages": "hi"}, "messages is not valid JSON: Expecting value"),
    "messages deep": ({"messages": "[" * 100_000}, "messages is not valid JSON: maximum recurs"),
    "messages no list": ({"messages": '"hi"'}, "messages is 'hi' but must be a list of messages"),
    "unknown role": (
        {"messages": '[{"role": "king", "content": "a"}]'},
        "messages[0] has role 'king' but allowed are system, user, assistant, tool",
    ),
    "messages half a character": (
        {"messages": '[{"role": "user", "content": "\\ud83d"}]'},
        "the prompt has a lone surrogate U+D83D at character 6; allowed is what UTF-8 can hold",
    ),
    "useless tools": (
        {
            "messages": '{"messages": [{"role": "user", "content": "a"}], "tools": '
            '[{"type": "function", "function": {"name": "add"}}]}'
        },
        "this model's chat template has no use for 'tools'",
    ),
    "flag of two": ({"text_input": "a", "stream": [True, True]}, "stream has shape [2] but must"),
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{key} {number}": (
            {"text_input": "a", "sampling_parameters": f'{{"{key}": {value}}}'},
            message,
        )
        for key, cases in KEYS.items()
        for number, (value, message) in enumerate(cases)
    },
    **{
        f"parameters {name}": ({"text_input": "a", "sampling_parameters": value}, message)
        for name, (value, message) in PARAMETERS.items()
    },
    **{f"prompt {name}": mistake for name, mistake in PROMPTS.items()},
}


def test_every_mistake_is_refused_by_name_value_and_what_is_allowed(
    make_service: MakeService, make_request: MakeRequest
) -> None:
    serving = make_service()
    running = make_request(
        text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 2000}'
    )
    serving.accept(running)
    requests = {name: make_request(**tensors) for name, (tensors, _) in MISTAKES.items()}
    for request in requests.values():
        serving.accept(request)
    for name, (_, message) in MISTAKES.items():
        sender = requests[name].sender.wait_final()
        assert (name, sender.error.code) == (name, "INVALID_ARG")
        assert sender.error.reason.startswith(message), (name, sender.error.reason)
        assert len(sender.error.message) <= 2000
        assert (sender.num_finals, sender.violations) == (1, [])
    assert running.sender.wait_final().text == "abcd" * 500


@pytest.mark.parametrize("key", KEYS)
def test_the_requests_own_parameters_are_checked_alike(
    make_service: MakeService, make_request: MakeRequest, key: str
) -> None:
    value, message = KEYS[key][0]
    request = make_request(text_input="a", parameters={key: json.loads(value)})
    make_service().accept(request)
    assert request.sender.wait_final().error.reason.startswith(message)


@pytest.mark.parametrize("key", ["temperature", "stop", "tenant", "nonesuch"])
def test_a_deep_value_is_the_clients_fault_however_deep(
    make_service: MakeService, make_request: MakeRequest, key: str
) -> None:
    """A few levels can be read but not printed; which they are depends on the stack."""
    serving = make_service()
    for num_levels in range(800, 1001):
        deep = "[" * num_levels + "]" * num_levels
        request = make_request(text_input="a", sampling_parameters=f'{{"{key}": {deep}}}')
        serving.accept(request)
        assert request.sender.wait_final().error.code == "INVALID_ARG"


def test_a_requests_own_parameters_are_not_read_if_they_are_too_long(
    make_service: MakeService, make_request: MakeRequest
) -> None:
    request = make_request(text_input="a", parameters={"stop": "x" * 2_097_152})
    make_service().accept(request)
    reason = request.sender.wait_final().error.reason
    assert reason == "parameters has 2,097,164 characters but must have at most 2,097,152"


@dataclass
class Gate:
    """A tokenizer that encodes huge texts only when it is told to."""

    tokenizer: Tokenizer
    open: threading.Event

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= HUGE_PROMPT:
            assert self.open.wait(10.0)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_a_huge_prompt_holds_up_neither_long_nor_short_ones(
    make_client: Callable[..., Any],
    make_request: MakeRequest,
    pb_utils: Any,
    tokenizer: Tokenizer,
) -> None:
    client = make_client()
    client.wait_ready()
    gate: Any = Gate(tokenizer, threading.Event())
    metrics, config = EngineMetrics(pb_utils, "octavo", "1"), EngineConfig("fake")
    serving = Service(client, gate, pb_utils, metrics, (), config)
    huge, long, short = (
        make_request(text_input="x" * length, sampling_parameters='{"max_tokens": 1}')
        for length in (HUGE_PROMPT, LONG_PROMPT, 1)
    )
    for request in (huge, long, short):
        serving.accept(request)
    assert short.sender.wait_final().text == "xx"
    assert long.sender.wait_final().text == "x" * (LONG_PROMPT + 1)
    assert huge.sender.num_finals == 0
    gate.open.set()
    assert "1,048,576 tokens" in huge.sender.wait_final().error.reason
    serving.close()


def test_a_conversation_of_many_messages_holds_up_no_short_prompt(
    make_service: MakeService, make_request: MakeRequest
) -> None:
    serving = make_service()
    many = json.dumps([{"role": "user", "content": "word " * 4}] * 10_000)
    conversation = make_request(messages=many)
    serving.accept(conversation)
    short = make_request(text_input="x", sampling_parameters='{"max_tokens": 1}')
    started = time.monotonic()
    serving.accept(short)
    assert short.sender.wait_final().text == "xx"
    others_s = time.monotonic() - started
    assert "tokens but max_model_len" in conversation.sender.wait_final().error.reason
    assert others_s < time.monotonic() - started
