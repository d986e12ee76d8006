from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.errors import InvalidRequest
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
ASKED = {"role": "assistant", "content": None}
TEXT = {"type": "text", "text": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **function}}


def call(**changes: Any) -> dict[str, Any]:
    """Return a message of the assistant that calls a function."""
    return ASKED | {"tool_calls": [{"id": "c1", "function": {"name": "add"}, **changes}]}


def called(**function: Any) -> dict[str, Any]:
    return call(function={"name": "add", **function})


def tools(value: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": value}


def options(value: Any) -> dict[str, Any]:
    return {"messages": [USER], "chat_template_kwargs": value}


def test_the_demo_template_adds_its_system_prompt_and_opens_the_answer(
    demo_tokenizer: Tokenizer,
) -> None:
    assert render_chat(demo_tokenizer, [USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_whole_conversation_is_rendered_in_order(demo_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "你好"},
    ]
    assert render_chat(demo_tokenizer, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], r"messages is \[\] but must be a list of messages, or an object that has one"),
        (None, "messages is None but must be a list of messages"),
        ("hi", "messages is 'hi' but must be a list of messages"),
        ({}, "messages is None but must be a list of messages"),
        (
            {"role": "user"},
            "messages has key 'role' but allowed are messages, tools, documents, chat_template_k",
        ),
        ([USER, "hi"], r"messages\[1\] is 'hi' but must be an object"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        (
            [USER | {"role": "boss"}],
            r"messages\[0\] has role 'boss' but allowed are system, user, assistant, tool$",
        ),
        ([USER | {"role": ["user"]}], r"messages\[0\] has role \['user'\] but allowed are"),
        ([USER | {"content": None}], r"messages\[0\] has no 'content'"),
        ([USER | {"content": 5}], r"messages\[0\].content is 5 but must be a string or a list of"),
        ([USER | {"content": []}], r"messages\[0\].content is \[\] but must be a string or a list"),
        ([USER | {"content": [{"text": "Hi"}]}], r"messages\[0\].content\[0\] is .* but must be"),
        ([USER | {"content": [TEXT, IMAGE]}], r"messages\[0\].content\[1\] is .* this model reads"),
        ([USER | {"name": 5}], r"messages\[0\].name is 5 but must be a string"),
        (
            [USER | {"nane": "Ann"}],
            r"messages\[0\] has key 'nane' but allowed for role 'user' are role, content, name$",
        ),
        (
            [USER | {"tool_calls": []}],
            r"messages\[0\] has key 'tool_calls' but allowed for role 'us",
        ),
        ([ASKED | {"tool_calls": {}}], r"messages\[0\].tool_calls is \{\} but must be a list"),
        (
            [ASKED | {"tool_calls": [1]}],
            r"messages\[0\].tool_calls\[0\] is 1 but must be an object",
        ),
        ([ASKED | {"tool_calls": [{}]}], r"tool_calls\[0\].function is None but must be an object"),
        ([call(id=7)], r"tool_calls\[0\].id is 7 but must be a string"),
        ([call(type="code")], r"tool_calls\[0\].type is 'code' but must be 'function'"),
        (
            [call(function={})],
            r"tool_calls\[0\].function.name is None but must be a function's name",
        ),
        ([called(arguments="{")], r"function.arguments is not valid JSON"),
        (
            [called(arguments="[1]")],
            r"function.arguments is '\[1\]' but must be an object, or a str",
        ),
        ([called(arguments=3)], r"function.arguments is 3 but must be an object"),
        ([called(argument="{}")], r"function has key 'argument' but allowed are name, arguments"),
        (
            [{"role": "tool", "content": "5", "tool_call_id": 5}],
            r"tool_call_id is 5 but must be a s",
        ),
        (tools(5), "tools is 5 but must be a list"),
        (tools([5]), r"tools\[0\] is 5 but must be an object"),
        (tools([{"type": "retrieval"}]), r"tools\[0\].type is 'retrieval' but must be 'function'"),
        (tools([{"type": "function"}]), r"tools\[0\].function is None but must be an object"),
        (
            tools([ADD | {"strict": True}]),
            r"tools\[0\] has key 'strict' but allowed are type, funct",
        ),
        (tools([tool(name="")]), r"tools\[0\].function.name is '' but must be a function's name"),
        (
            tools([tool(parameters=[])]),
            r"tools\[0\].function.parameters is \[\] but must be a JSON",
        ),
        ({"messages": [USER], "documents": ["a"]}, r"documents\[0\] is 'a' but must be an object"),
        (options(5), "chat_template_kwargs is 5 but must be an object"),
        (
            options({"tokenize": True}),
            "chat_template_kwargs has 'tokenize', which is for the serv",
        ),
        (
            options({"chat_template": "{{ 1 }}"}),
            "chat_template_kwargs has 'chat_template', which is",
        ),
        (options({"messages": []}), "chat_template_kwargs has 'messages', which is for the"),
        (options({"bos_token": "x"}), "chat_template_kwargs has 'bos_token', which is for the"),
    ],
)
def test_a_malformed_message_is_refused_by_its_place(
    messages: Any, reason: str, demo_tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        render_chat(demo_tokenizer, messages)


def test_a_model_without_a_template_refuses_messages(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="this model has no chat template"):
        render_chat(tokenizers["byte_level"], [USER])


@pytest.fixture
def with_template(tokenizers: dict[str, Tokenizer]) -> Callable[[str], Tokenizer]:
    """Make tokenizers with a chat template."""
    backend = tokenizers["llama"].hf.backend_tokenizer
    return lambda template: Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=template, bos_token="<s>", eos_token="</s>"
        )
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[1].content }}", "list object has no element 1"),
        ("{{ 1 // (messages | length - 1) }}", "modulo by zero"),
        ("{{ messages[0].content.__class__.mro() }}", "access to attribute '__class__'"),
    ],
)
def test_what_the_template_itself_refuses_is_an_invalid_request(
    with_template: Callable[[str], Tokenizer], template: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"template refuses these messages: .*{reason}"):
        render_chat(with_template(template), [USER])


def seen_by(with_template: Callable[[str], Tokenizer], conversation: Any) -> Any:
    """Return what a template gets."""
    template = "{{ [messages, tools, documents, thinks | default(none)] | tojson }}"
    return json.loads(render_chat(with_template(template), conversation))


def test_a_template_gets_calls_with_arguments_as_objects_and_content_as_text(
    with_template: Callable[[str], Tokenizer],
) -> None:
    conversation = [
        {"role": "system", "content": [TEXT, TEXT], "name": "host"},
        USER | {"name": None, "tool_calls": None},
        called(arguments='{"a": 1, "b": [2]}') | {"reasoning_content": "sum", "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "3", "tool_calls": []},
        called(arguments=""),
        called(arguments={"a": 2}) | {"content": "so"},
    ]
    messages, given_tools, documents, thinks = seen_by(with_template, conversation)
    assert (given_tools, documents, thinks) == (None, None, None)
    assert messages[0] == {"role": "system", "content": "Hi\nHi", "name": "host"}
    assert messages[1] == USER
    (first,) = messages[2]["tool_calls"]
    assert first == {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1, "b": [2]}},
    }
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("", "sum")
    assert messages[3] == conversation[3]
    assert messages[4] == {"role": "assistant", "content": "3"}
    assert messages[5]["tool_calls"][0]["function"]["arguments"] == {}
    assert messages[6]["content"] == "so"


def test_a_template_gets_what_stands_beside_the_messages_as_it_is(
    with_template: Callable[[str], Tokenizer],
) -> None:
    conversation = {
        "messages": [USER],
        "tools": [ADD],
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"thinks": False},
    }
    assert seen_by(with_template, conversation) == [
        [USER],
        [ADD],
        [{"title": "a", "text": "b"}],
        False,
    ]
    empty = {"messages": [USER], "tools": [], "documents": None}
    assert seen_by(with_template, empty) == [[USER], None, None, None]


@pytest.mark.parametrize(
    ("conversation", "name"),
    [
        (tools([ADD]), "'tools'"),
        ({"messages": [USER], "documents": [{"text": "a"}]}, "'documents'"),
        (options({"enable_thinking": False}), "'enable_thinking'"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(
    demo_tokenizer: Tokenizer, conversation: Any, name: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^this model's chat template has no use for {name}$"):
        render_chat(demo_tokenizer, conversation)


def test_tools_choose_the_template_that_is_made_for_them(
    tokenizers: dict[str, Tokenizer],
) -> None:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers["llama"].hf.backend_tokenizer,
        chat_template={"default": "plain", "tool_use": "{{ tools[0].function.name }}"},
    )
    assert render_chat(Tokenizer(hf), [USER]) == "plain"
    assert render_chat(Tokenizer(hf), tools([ADD])) == "add"


@pytest.mark.parametrize("num_levels", [50, 980])
def test_deep_json_is_a_prompt_or_refused(
    with_template: Callable[[str], Tokenizer], num_levels: int
) -> None:
    deep = "[" * num_levels + "]" * num_levels
    conversation = [called(arguments=f'{{"a": {deep}}}')]
    tokenizer = with_template("{{ messages | tojson }}")
    if num_levels < 100:
        assert deep in render_chat(tokenizer, conversation)
    else:
        with pytest.raises(InvalidRequest, match="recursion"):
            render_chat(tokenizer, conversation)
