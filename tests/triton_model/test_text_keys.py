"""What a client asks of the text, through the whole stub; the fake engine repeats prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]

END = 256


@pytest.fixture
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the ids of a text in which `]` is the token that ends a text, `<end>`."""
    return lambda text: [END if char == "]" else tokenizer.encode(char)[0] for char in text]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"skip_special_tokens": "false", "include_stop_str_in_output": "true"}, "ab<end>"),
    ],
    ids=["neither", "special kept", "end shown", "both"],
)
def test_the_end_is_shown_when_both_is_asked_for(
    make_service: MakeService,
    ask: Ask,
    ids: Callable[[str], list[int]],
    stream: bool,
    params: dict[str, Any],
    text: str,
) -> None:
    sender = ask(
        make_service(),
        input_ids=ids("ab]"),
        stream=stream,
        exclude_input_in_output=True,
        stop_token_ids=[END],
        **params,
    )
    assert sender.wait_final().text == text


def test_the_prompt_is_shown_with_special_tokens_if_they_are_kept(
    make_service: MakeService, ask: Ask, ids: Callable[[str], list[int]]
) -> None:
    serving = make_service()
    kept = ask(serving, input_ids=ids("a]"), max_tokens=3, skip_special_tokens=False)
    assert kept.wait_final().text == "a<end>" + "a<end>a"
    assert ask(serving, input_ids=ids("a]"), max_tokens=3).wait_final().text == "a" + "aa"


@pytest.mark.parametrize(
    ("params", "text"), [({}, "ab"), ({"include_stop_str_in_output": True}, "abcd")]
)
def test_a_stop_string_is_shown_when_it_is_asked_for(
    make_service: MakeService, ask: Ask, params: dict[str, Any], text: str
) -> None:
    sender = ask(make_service(), "abcd", stop="cd", max_tokens=9, stream=True, **params)
    assert sender.wait_final().text == text


def test_a_conversation_with_tools_reaches_the_template(
    make_service: MakeService, ask: Ask
) -> None:
    """The template prints roles and contents; a call has none, and its arguments are checked."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    serving = make_service()
    prompt = "[user]1+1?[assistant][tool]2"
    for given in (messages, {"messages": messages}):
        sender = ask(serving, messages=json.dumps(given), max_tokens=1)
        assert sender.wait_final().text == prompt + "["
    call["function"] = {"name": "add", "arguments": "{"}
    error = ask(serving, messages=json.dumps(messages)).wait_final().error
    assert error.reason.startswith("messages[1].tool_calls[0].function.arguments is not valid JSON")
