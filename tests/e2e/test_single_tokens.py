"""What requests say of single tokens, through a real server, by every way to say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.demo_model import demo_checkpoint
from octavo.local.triton_server import TritonServer
from octavo.text.tokenizer import Tokenizer
from octavo_client import Client, Completion, InvalidRequest

pytestmark = pytest.mark.e2e

Post = Callable[..., tuple[int, str]]

COUNT = "1, 2, 3, 4, 5,"
GREEDY = {"temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def ids_of() -> Callable[[str], list[int]]:
    """Return the token ids of a text."""
    tokenizer = Tokenizer.load(str(demo_checkpoint()))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def ask(server: TritonServer, **params: Any) -> Completion:
    with Client(server.grpc_url, timeout_s=60) as client:
        return client.generate(COUNT, **{**GREEDY, **params})


@pytest.fixture(scope="module")
def plain(demo_server: TritonServer) -> Completion:
    answer = ask(demo_server)
    assert answer.text == " 6, 7, 8, 9, 10, 11,"
    return answer


def test_bad_words_do_not_come_with_or_without_a_space(
    demo_server: TritonServer, plain: Completion
) -> None:
    answer = ask(demo_server, bad_words=["7", "10"])
    assert answer.text.startswith(" 6,")
    assert "7" not in answer.text
    assert "10" not in answer.text
    again = ask(demo_server, bad_words=["no such words in it"])
    assert again == plain


def test_a_bad_word_that_begins_in_the_prompt_is_not_completed(demo_server: TritonServer) -> None:
    assert not ask(demo_server, bad_words=", 6").text.startswith(" 6")


def test_only_allowed_tokens_come(
    demo_server: TritonServer, ids_of: Callable[[str], list[int]]
) -> None:
    allowed = ids_of("789 ")
    for temperature in (0, 2.0):
        answer = ask(demo_server, allowed_token_ids=allowed, temperature=temperature)
        assert set(answer.token_ids) <= set(allowed)
        assert len(answer.token_ids) == 20


def test_a_bias_raises_and_lowers_a_token(
    demo_server: TritonServer, plain: Completion, ids_of: Callable[[str], list[int]]
) -> None:
    (comma,) = ids_of(",")
    assert set(ask(demo_server, logit_bias={comma: 100}).token_ids) == {comma}
    assert comma in plain.token_ids
    assert comma not in ask(demo_server, logit_bias={comma: -100}).token_ids


def test_penalties_change_the_answer_of_those_who_ask_alone(
    demo_server: TritonServer, plain: Completion
) -> None:
    with Client(demo_server.grpc_url, timeout_s=60) as client:
        others = client.stream(COUNT, **GREEDY)
        answers = [
            ask(demo_server, **{key: value})
            for key, value in (
                ("repetition_penalty", 2.0),
                ("presence_penalty", 2.0),
                ("frequency_penalty", 2.0),
            )
        ]
        assert Completion.from_deltas(list(others)).text == plain.text
    for answer in answers:
        assert len(set(answer.token_ids)) > len(set(plain.token_ids))


def test_http_takes_numbers_and_objects_as_strings(
    demo_server: TritonServer, post: Post, ids_of: Callable[[str], list[int]]
) -> None:
    (comma,) = ids_of(",")
    parameters = {
        "temperature": "0",
        "max_tokens": "4",
        "repetition_penalty": "1.1",
        "presence_penalty": "-0.5",
        "logit_bias": json.dumps({str(comma): "100"}),
    }
    body = {"text_input": COUNT, "exclude_input_in_output": True, "parameters": parameters}
    status, answer = post(demo_server, "models/octavo/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, ",,,,")


def test_a_request_that_rules_out_every_token_ends_with_an_error_of_its_own(
    demo_server: TritonServer, plain: Completion, ids_of: Callable[[str], list[int]]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(demo_server, allowed_token_ids=ids_of("7"), bad_words="7")
    assert "no token can be drawn: allowed_token_ids, bad_words must leave" in str(caught.value)
    assert ask(demo_server) == plain


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0 but must be a number in"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3.0 but must be a number in [-2, 2]"),
        ({"logit_bias": {"49152": 1}}, "logit_bias has 49152 but token ids are 0 to 49151"),
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 ids but must have at least 1"),
        ({"bad_words": [""]}, "bad_words has an empty string but each must have a character"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_value_is_refused_by_name(
    demo_server: TritonServer, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(demo_server, **params)
    assert message in str(caught.value)
