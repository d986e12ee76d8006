from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.errors import InvalidRequest
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}


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
        ([], r"messages is \[\] but must be a list of messages"),
        ({"role": "user"}, "messages is .* but must be a list of messages"),
        ("hi", "messages is 'hi' but must be a list of messages"),
        ([USER, "hi"], r"messages\[1\] is 'hi' but must be an object"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([USER | {"role": "boss"}], r"messages\[0\] has role 'boss' but allowed are system, user"),
        ([USER | {"role": ["user"]}], r"messages\[0\] has role \['user'\] but allowed are"),
        ([USER | {"content": None}], r"messages\[0\] has content None but must have a string"),
        ([USER | {"content": [{"text": "Hi"}]}], r"has content .* but must have a string"),
        ([USER | {"name": "Ann"}], r"messages\[0\] has key 'name' but allowed are"),
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


def test_what_the_template_itself_refuses_is_an_invalid_request(
    tokenizers: dict[str, Tokenizer],
) -> None:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers["llama"].hf.backend_tokenizer,
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        render_chat(Tokenizer(hf), [USER])
