"""Log-probabilities through the whole stub; the fake engine's tokens repeat their prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]

FLAGS = {"return_logprobs": True, "return_cumulative_logprob": True, "return_token_ids": True}


def _place(text: str, count: int) -> dict[str, Any]:
    """Return what the fake engine says of a token of one character."""
    token_id = ord(text) - 33  # as the test's tokenizer numbers them
    own = {"logprob": -0.5 * (1 + count), "rank": 1 + count, "decoded_token": text}
    others = {
        str(token_id - 1 - i): {
            "logprob": -0.5 * (1 + i),
            "rank": 1 + i,
            "decoded_token": chr(ord(text) - 1 - i),
        }
        for i in range(count)
    }
    return {str(token_id): own, **others}


def _joined(sender: Any) -> list[dict[str, Any]]:
    return [each for r in sender.responses for each in json.loads(r.output("logprobs"))]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 2])
def test_each_new_token_has_an_entry_that_names_it_first(
    make_service: MakeService, ask: Ask, stream: bool, count: int
) -> None:
    sender = ask(make_service(), "cde", max_tokens=5, stream=stream, logprobs=count, **FLAGS)
    entries = _joined(sender.wait_final())
    assert entries == [_place(text, count) for text in "cdecd"]
    assert [next(iter(entry)) for entry in entries] == [str(ord(text) - 33) for text in "cdecd"]
    assert sender.responses[-1].output("cumulative_logprob") == -0.5 * (1 + count) * 5


def test_the_sum_of_a_stream_is_that_so_far(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "cde", max_tokens=30, stream=True, **FLAGS).wait_final()
    num_tokens = 0
    for response in sender.responses:
        num_tokens += len(json.loads(response.output("logprobs")))
        assert response.output("cumulative_logprob") == -0.5 * num_tokens
    assert num_tokens == 30


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_cuts_them_where_it_cuts_the_tokens(
    make_service: MakeService, ask: Ask, stream: bool
) -> None:
    sender = ask(make_service(), "abcdefgh", stop="de", max_tokens=99, stream=stream, **FLAGS)
    assert _joined(sender.wait_final()) == [_place(text, 0) for text in "abcde"]
    assert sender.responses[-1].output("cumulative_logprob") == -2.5


def test_a_flag_alone_means_0_beside_and_a_key_alone_sends_nothing(
    make_service: MakeService, ask: Ask
) -> None:
    service = make_service()
    flag, key = (
        ask(service, "cde", max_tokens=1, **asked).wait_final().responses[0]
        for asked in ({"return_logprobs": True}, {"logprobs": 2, "prompt_logprobs": 2})
    )
    assert json.loads(flag.output("logprobs")) == [_place("c", 0)]
    assert [tensor.name() for tensor in key.output_tensors] == ["text_output"]


def test_the_sum_alone_may_be_asked_for(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "cde", max_tokens=4, logprobs=9, return_cumulative_logprob=True)
    (response,) = sender.wait_final().responses
    names = [tensor.name() for tensor in response.output_tensors]
    assert names == ["text_output", "cumulative_logprob"]
    assert response.output("cumulative_logprob") == -2.0


def test_each_of_n_answers_has_its_own(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "cde", n=2, max_tokens=2, **FLAGS)
    (response,) = sender.wait_final().responses
    assert [json.loads(text) for text in response.output("logprobs")] == [
        [_place("c", 0), _place("d", 0)],
        [_place("d", 0), _place("e", 0)],
    ]
    assert response.output("cumulative_logprob") == [-1.0, -1.0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_the_first_response_tells_of_the_prompt(
    make_service: MakeService, ask: Ask, stream: bool, n: int
) -> None:
    sender = ask(
        make_service(),
        "cde",
        n=n,
        max_tokens=20,
        stream=stream,
        prompt_logprobs="1",
        return_prompt_logprobs=True,
    ).wait_final()
    first, *later = sender.responses
    assert json.loads(first.output("prompt_logprobs")) == [None, _place("d", 1), _place("e", 1)]
    for response in later:
        assert [tensor.name() for tensor in response.output_tensors] == ["text_output"]


def test_a_prompt_of_one_token_has_nothing_to_tell(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "c", max_tokens=1, return_prompt_logprobs=True).wait_final()
    assert json.loads(sender.responses[0].output("prompt_logprobs")) == [None]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logprobs": 4}, "logprobs is 4 but must be an integer from 0 to 3 (max_logprobs)"),
        ({"prompt_logprobs": 3}, "prompt_logprobs is 3 and the prompt has 65,537 tokens, but tok"),
    ],
)
@pytest.mark.parametrize("is_sent", [True, False])
def test_too_many_are_refused_whether_or_not_they_would_be_sent(
    make_service: MakeService, ask: Ask, asked: dict[str, int], message: str, is_sent: bool
) -> None:
    service = make_service(max_logprobs=3)
    flags = {"return_logprobs": is_sent, "return_prompt_logprobs": is_sent}
    error = ask(service, input_ids=[5] * 65_537, max_tokens=1, **asked, **flags).wait_final().error
    assert error.code == "INVALID_ARG"
    assert error.reason.startswith(message)
