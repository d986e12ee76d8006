"""Chat messages to a prompt, by the model's own template; knows nothing of tokens."""

from __future__ import annotations

import inspect
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.text.chat_messages import Conversation, read_conversation
from octavo.text.tokenizer import Tokenizer

_MAX_REASON_LENGTH = 500


def render_chat(tokenizer: Tokenizer, messages: Any) -> str:
    """Return the prompt of a conversation, up to where the assistant's answer begins.

    The template writes the special tokens itself: encode the prompt without adding any.

    Args:
        tokenizer: the tokenizer whose template is used.
        messages: what `read_conversation` reads, as decoded from JSON.

    Raises:
        InvalidRequest: a message is malformed, or the template is missing, refuses them or has no
            use for what stands beside them.
    """
    conversation = read_conversation(messages)
    if not tokenizer.has_chat_template:
        raise InvalidRequest("messages cannot be used: this model has no chat template")
    try:
        _check_use(tokenizer, conversation)
        prompt: str = tokenizer.hf.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            tokenize=False,
            add_generation_prompt=True,
            **conversation.template_kwargs,
        )
    except InvalidRequest:
        raise
    except Exception as error:
        # A template is a program: what it raises on messages it did not expect may be anything.
        reason = str(error)[:_MAX_REASON_LENGTH]
        raise InvalidRequest(f"the chat template refuses these messages: {reason}") from None
    return prompt


def _check_use(tokenizer: Tokenizer, conversation: Conversation) -> None:
    """Refuse what the template would leave out without a word."""
    template = tokenizer.hf.get_chat_template(tools=conversation.tools)
    parameters = inspect.signature(tokenizer.hf.apply_chat_template).parameters
    for name in conversation.template_kwargs:
        if name in ("messages", *parameters, *tokenizer.hf.special_tokens_map):
            raise InvalidRequest(
                f"chat_template_kwargs has {shown(name)}, which is for the server alone to set"
            )
    beside = {"tools": conversation.tools, "documents": conversation.documents}
    given = [name for name, value in beside.items() if value is not None]
    for name in (*given, *conversation.template_kwargs):
        if name not in template:
            raise InvalidRequest(f"this model's chat template has no use for {shown(name)}")
