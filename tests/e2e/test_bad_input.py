"""Every kind of wrong request ends with its code and a reason, and touches no other request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

OpenExchange = Callable[[TritonServer], Any]

MEGABYTE = "word " * 200_000
CONTEXT = 32_768
TOOL = {"type": "function", "function": {"name": "add"}}
UNDISTURBED = {"max_tokens": 3000, "ignore_eos": True, "seed": 4}
#: What no message may show: a stack, or where the server keeps its files.
SECRETS = re.compile(r'Traceback|File "|\.py\b|site-packages|/tmp/|/home/|/root/')


def sampling(**params: Any) -> dict[str, Any]:
    return {"text_input": "a", "sampling_parameters": json.dumps(params)}


def raw_sampling(text: str | bytes) -> dict[str, Any]:
    return {"text_input": "a", "sampling_parameters": text}


def messages(value: Any) -> dict[str, Any]:
    return {"messages": json.dumps(value)}


def strings(*values: str) -> np.ndarray:
    return np.array([value.encode() for value in values], np.object_)


# Name of the mistake: tensors, and a piece of the message.
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"stream": True}, "has no prompt but must have one of text_input, input_ids"),
    "two prompts": ({"text_input": "a", "input_ids": [1]}, "has text_input and input_ids but"),
    "ids of rank 0": ({"input_ids": np.zeros([0], np.int32)}, "input_ids"),
    "empty text": ({"text_input": ""}, "text_input is empty but must have at least one"),
    "text not UTF-8": ({"text_input": b"ab\xff"}, "text_input has byte 0xff at position 2"),
    "negative id": ({"input_ids": [3, -1]}, "input_ids has -1 at position 1 but token ids are 0"),
    "unknown id": ({"input_ids": [49152]}, "input_ids has 49152 at position 0 but token ids are"),
    "too many ids": ({"input_ids": [9] * CONTEXT}, "32,768 tokens but max_model_len is 32,768"),
    "eight megabytes": ({"text_input": "x" * 8_000_000}, "8,000,000 characters but at most 2,65"),
    "ten megabytes": (
        {"text_input": "x" * 10_000_000},
        "text_input has 10,000,000 bytes but max_prompt_bytes is 8,388,608; shorten it or raise",
    ),
    "ten megabytes of ids": (
        {"input_ids": [9] * 2_500_000},
        "input_ids has 10,000,000 bytes but max_prompt_bytes is 8,388,608; shorten it or raise",
    ),
    "many messages": (messages([0] * 10_001), "messages has 10,001 items but at most 10,000 are"),
    "a megabyte": ({"text_input": MEGABYTE}, "tokens but max_model_len is 32,768"),
    "messages no JSON": ({"messages": "{"}, "messages is not valid JSON"),
    "messages empty": (messages([]), "messages is [] but must be a list of messages"),
    "messages an object": (messages({"role": "user"}), "messages has key 'role' but allowed are"),
    "useless tools": (
        messages({"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}),
        "this model's chat template has no use for 'tools'",
    ),
    "message a string": (messages(["hi"]), "messages[0] is 'hi' but must be an object"),
    "unknown role": (messages([{"role": "king", "content": "a"}]), "messages[0] has role 'king'"),
    "no content": (messages([{"role": "user"}]), "messages[0] has no 'content'"),
    "content a list": (messages([{"role": "user", "content": []}]), "content is [] but must be a"),
}
SAMPLING: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (sampling(temprature=1), "'temprature'; did you mean 'temperature'?"),
    "logprobs too many": (sampling(logprobs=21), "logprobs is 21 but must be an integer from 0 to"),
    "logprobs negative": (sampling(prompt_logprobs=-1), "prompt_logprobs is -1 but must be an int"),
    "no answers": (sampling(n=0), "n is 0 but must be an integer from 1 to 128"),
    "too many answers": (sampling(n=129), "n is 129 but must be an integer from 1 to 128"),
    "more than run": (sampling(n=65), "n is 65 but max_num_seqs is 64; ask for fewer answers"),
    "priority a word": (sampling(priority="high"), "priority is 'high' but must be an integer"),
    "priority too high": (sampling(priority=2**31), "priority is 2147483648 but must be an int"),
    "deadline zero": (sampling(deadline_ms=0), "deadline_ms is 0.0 but must be a number of mill"),
    "deadline a word": (sampling(deadline_ms="soon"), "deadline_ms is 'soon' but must be a numb"),
    "tenant a number": (sampling(tenant=5), "tenant is 5 but must be a string"),
    "tenant too long": (sampling(tenant="x" * 257), "tenant has 257 characters but must have at"),
    "salt a list": (sampling(cache_salt=["a"]), "cache_salt is ['a'] but must be a string"),
    "salt too long": (sampling(cache_salt="x" * 257), "cache_salt has 257 characters but must"),
    "temperature NaN": (sampling(temperature=float("nan")), "temperature is nan but must be"),
    "temperature inf": (sampling(temperature=float("inf")), "temperature is inf but must be"),
    "temperature negative": (sampling(temperature=-0.1), "temperature is -0.1 but must be a num"),
    "temperature text": (sampling(temperature="hot"), "temperature is 'hot' but must be a number"),
    "temperature true": (sampling(temperature=True), "temperature is True but must be a number"),
    "top_k negative": (sampling(top_k=-5), "top_k is -5 but must be -1 or 0 (all) or"),
    "top_k fraction": (sampling(top_k=1.5), "top_k is 1.5 but must be an integer"),
    "top_p zero": (sampling(top_p=0), "top_p is 0.0 but must be a number in (0, 1]"),
    "top_p above 1": (sampling(top_p=1.5), "top_p is 1.5 but must be a number in (0, 1]"),
    "min_p above 1": (sampling(min_p=2), "min_p is 2.0 but must be a number in [0, 1]"),
    "seed too large": (sampling(seed=2**64), "but must be a signed 64-bit integer"),
    "max_tokens zero": (sampling(max_tokens=0), "max_tokens is 0 but must be an integer from 1"),
    "min above max": (sampling(min_tokens=9, max_tokens=8), "min_tokens is 9 but must be an int"),
    "stop a number": (sampling(stop=5), "stop is 5 but must be a string or a list of strings"),
    "stop empty": (sampling(stop=["a", ""]), "stop has an empty string but each must have"),
    "stop too long": (sampling(stop="x" * 16_385), "stop has 16,385 characters in all but"),
    "too many stops": (sampling(stop=[str(i) for i in range(10_000)]), "stop has 10,000 strings"),
    "stop id unknown": (sampling(stop_token_ids=[49152]), "stop_token_ids has 49152 but token ids"),
    "stop id negative": (sampling(stop_token_ids=[-1]), "stop_token_ids is -1 but must be"),
    "ignore_eos a word": (sampling(ignore_eos="maybe"), "ignore_eos is 'maybe' but must be true"),
    "no JSON": (raw_sampling("{temperature: 1}"), "sampling_parameters is not valid JSON"),
    "a list": (raw_sampling("[1]"), "sampling_parameters must be a JSON object, not list"),
    "deeply nested": (raw_sampling("[" * 100_000), "sampling_parameters is not valid JSON"),
    "huge number": (raw_sampling('{"seed": ' + "9" * 5000 + "}"), "sampling_parameters is not"),
    "parameters not UTF-8": (raw_sampling(b"\xc3("), "sampling_parameters has byte 0xc3"),
}
#: Triton itself refuses these before the model sees them, and names no code.
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "two texts": ({"text_input": strings("a", "b")}, "text_input"),
    "text of rank 2": ({"text_input": strings("a").reshape(1, 1)}, "text_input"),
    "ids of rank 2": ({"input_ids": np.array([[1, 2]], np.int32)}, "input_ids"),
    "unknown tensor": ({"text_input": "a", "nonesuch": True}, "nonesuch"),
    "text as ids": ({"text_input": [1]}, "text_input"),
    "ids as text": ({"input_ids": "1 2 3"}, "input_ids"),
    "ids of 64 bits": ({"input_ids": np.array([1], np.int64)}, "input_ids"),
    "stream a string": ({"text_input": "a", "stream": "true"}, "stream"),
    "two streams": ({"text_input": "a", "stream": np.array([True, False])}, "stream"),
}
MISTAKES = {
    **{name: ("INVALID_ARG: ", *mistake) for name, mistake in (PROMPTS | SAMPLING).items()},
    **{name: ("", *mistake) for name, mistake in SHAPES.items()},
}


def refusal(stream: Any) -> InferenceServerException:
    """Return the error that a stream's only request ends with."""
    with pytest.raises(InferenceServerException) as caught:
        stream.receive()
    return caught.value


@pytest.fixture(scope="module")
def undisturbed(tiny_server: TritonServer) -> Iterator[None]:
    """Keep a stream running through the tests of this file; it must end with the right tokens.

    It is read only at the end, when a whole answer to the same request says what is right.
    """
    with Client(tiny_server.grpc_url, timeout_s=300) as client:
        streams = [client.stream("x", **UNDISTURBED) for _ in range(2)]
        yield
        tokens = [tuple(token for delta in s for token in delta.token_ids) for s in streams]
        assert tokens == [client.generate("x", **UNDISTURBED).token_ids] * 2


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(("code", "tensors", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_refused_with_a_reason(
    tiny_server: TritonServer,
    exchange: OpenExchange,
    code: str,
    tensors: dict[str, Any],
    message: str,
) -> None:
    with exchange(tiny_server) as stream:
        stream.send(tensors)
        error = refusal(stream)
    assert error.message().startswith(code)
    assert message in error.message()
    assert not SECRETS.search(error.message())
    assert len(error.message()) <= 2000


@pytest.mark.usefixtures("undisturbed")
def test_unknown_model_is_refused(tiny_server: TritonServer, exchange: OpenExchange) -> None:
    with exchange(tiny_server) as stream:
        stream.send({"text_input": "a"}, model="nonesuch")
        error = refusal(stream)
    assert "nonesuch" in error.message()


@pytest.mark.usefixtures("undisturbed")
def test_parameters_of_the_request_are_checked_like_the_tensor(
    tiny_server: TritonServer, exchange: OpenExchange
) -> None:
    with exchange(tiny_server) as stream:
        stream.send({"text_input": "a"}, parameters={"top_k": "many"})
        error = refusal(stream)
    assert error.message() == "INVALID_ARG: top_k is 'many' but must be an integer"


def test_megabyte_prompts_hold_up_no_other_request(
    tiny_server: TritonServer, exchange: OpenExchange
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client, ExitStack() as stack:
        streams = [stack.enter_context(exchange(tiny_server)) for _ in range(3)]
        started = time.monotonic()
        for stream in streams:
            stream.send({"text_input": MEGABYTE})
        client.generate("a", max_tokens=1)
        others_s = time.monotonic() - started
        assert all("max_model_len" in refusal(stream).message() for stream in streams)
        all_s = time.monotonic() - started
    assert others_s < all_s < 30.0, "the short request came after the long ones"


def test_longest_prompt_that_fits_is_answered(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, timeout_s=120) as client:
        answer = client.generate(input_ids=[9] * (CONTEXT - 1), ignore_eos=True)
    assert answer.num_input_tokens == CONTEXT - 1
    assert (answer.num_output_tokens, answer.finish_reason) == (1, "length")


@pytest.mark.usefixtures("undisturbed")
def test_long_text_that_fits_is_answered(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, timeout_s=120) as client:
        answer = client.generate("word " * 30_000, max_tokens=3, ignore_eos=True)
    assert 30_000 <= answer.num_input_tokens < CONTEXT
    assert answer.num_output_tokens == 3
