"""Chat messages to a prompt, by the model's own template; knows nothing of tokens."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from octavo.errors import InvalidRequest
from octavo.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")


def render_chat(tokenizer: Tokenizer, messages: Any) -> str:
    """Return the prompt of a conversation, up to where the assistant's answer begins.

    The template writes the special tokens itself: encode the prompt without adding any.

    Args:
        tokenizer: the tokenizer whose template is used.
        messages: a list of `{"role": ..., "content": ...}`, as decoded from JSON.

    Raises:
        InvalidRequest: a message is malformed, or the template is missing or refuses them.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"messages is {_shown(messages)} but must be a list of messages")
    for index, message in enumerate(messages):
        _check_message(index, message)
    if not tokenizer.has_chat_template:
        raise InvalidRequest("messages cannot be used: this model has no chat template")
    try:
        prompt: str = tokenizer.hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from None
    return prompt


def _check_message(index: int, message: Any) -> None:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} is {_shown(message)} but must be an object")
    for key in ("role", "content"):
        if key not in message:
            raise InvalidRequest(f"{name} has no {key!r}")
    for key in message:
        if key not in ("role", "content"):
            raise InvalidRequest(f"{name} has key {key!r} but allowed are 'role' and 'content'")
    if message["role"] not in ROLES:
        raise InvalidRequest(
            f"{name} has role {_shown(message['role'])} but allowed are {', '.join(ROLES)}"
        )
    if not isinstance(message["content"], str):
        raise InvalidRequest(
            f"{name} has content {_shown(message['content'])} but must have a string"
        )


def _shown(value: Any) -> str:
    return repr(value)[:80]
