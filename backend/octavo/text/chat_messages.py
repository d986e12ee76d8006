"""A conversation as clients send it: read, checked, and refused by place.

What is accepted is OpenAI's chat format as far as it is text; what comes out is what templates
read. Knows nothing of templates, tokens or prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import InvalidRequest, shown

#: A message's keys beside `role` and `content`, by role; any message may have a name.
_MORE_KEYS = {
    "system": (),
    "user": (),
    "assistant": ("tool_calls", "reasoning_content"),
    "tool": ("tool_call_id",),
}
ROLES = tuple(_MORE_KEYS)
#: Of messages, of their parts and calls, of tools or of documents: a template takes 20 us for each.
MAX_ITEMS = 10_000
_STRINGS = ("name", "reasoning_content", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    """In order; every one has a `role` and a `content`, which is text."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    documents: list[dict[str, Any]] | None = None
    """What the model may quote."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template's own, such as `enable_thinking`."""


def read_conversation(given: Any) -> Conversation:
    """Return a conversation given as a list of messages, or as an object that has one.

    Args:
        given: decoded JSON. An object may have `tools`, `documents` and `chat_template_kwargs`
            beside its `messages`. A key of null counts as absent.

    Raises:
        InvalidRequest: names the place, what is there and what is allowed.
    """
    if not isinstance(given, dict):
        return Conversation(_read_messages(given))
    allowed = ("messages", "tools", "documents", "chat_template_kwargs")
    parts = _read_object("messages", given, allowed)
    kwargs = parts.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise _refused("chat_template_kwargs", kwargs, "an object")
    return Conversation(
        _read_messages(parts.get("messages")),
        [_read_tool(*each) for each in _items("tools", parts.get("tools", []))] or None,
        [_read_document(*each) for each in _items("documents", parts.get("documents", []))] or None,
        kwargs,
    )


def _read_messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise _refused("messages", given, "a list of messages, or an object that has one")
    return [_read_message(*each) for each in _items("messages", given)]


def _read_message(place: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _refused(place, given, "an object")
    role = given.get("role")
    if role is None:
        raise InvalidRequest(f"{place} has no 'role'")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{place} has role {shown(role)} but allowed are {', '.join(ROLES)}")
    allowed = ("role", "content", "name", *_MORE_KEYS[role])
    message = _read_object(place, given, allowed, f" for role {role!r}")
    for key in _STRINGS:
        if not isinstance(message.get(key, ""), str):
            raise _refused(f"{place}.{key}", message[key], "a string")
    calls = [_read_call(*each) for each in _items(f"{place}.tool_calls", message.get("tool_calls"))]
    if calls:
        # Templates do not expect a call without content, which clients send as null.
        return {"content": "", **message, "tool_calls": calls} | _content(place, message)
    message.pop("tool_calls", None)
    if "content" not in message:
        raise InvalidRequest(f"{place} has no 'content'")
    return message | _content(place, message)


def _content(place: str, message: dict[str, Any]) -> dict[str, str]:
    """Return the content as one text; texts in parts stand on lines of their own."""
    content = message.get("content", "")
    if isinstance(content, list) and content:
        content = "\n".join(_read_part(*each) for each in _items(f"{place}.content", content))
    if not isinstance(content, str):
        raise _refused(f"{place}.content", content, "a string or a list of text parts")
    return {"content": content}


def _read_part(place: str, given: Any) -> str:
    part = given if isinstance(given, dict) else {}
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _refused(place, given, '{"type": "text", "text": a string}: this model reads text')
    text: str = part["text"]
    return text


def _read_call(place: str, given: Any) -> dict[str, Any]:
    call = _read_object(place, given, ("id", "type", "function"))
    if call.get("type", "function") != "function":
        raise _refused(f"{place}.type", call["type"], "'function'")
    if not isinstance(call.get("id", ""), str):
        raise _refused(f"{place}.id", call["id"], "a string")
    function = _read_object(f"{place}.function", call.get("function"), ("name", "arguments"))
    _check_name(f"{place}.function.name", function)
    arguments = _read_arguments(f"{place}.function.arguments", function.get("arguments"))
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def _read_arguments(place: str, given: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object, which clients send as JSON in a string."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise _refused(place, given, "an object, or a string that holds one as JSON")
    return arguments


def _read_tool(place: str, given: Any) -> dict[str, Any]:
    """Return a tool as it is given, for templates print it whole."""
    tool = _read_object(place, given, ("type", "function"))
    if tool.get("type") != "function":
        raise _refused(f"{place}.type", tool.get("type"), "'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _refused(f"{place}.function", function, "an object")
    _check_name(f"{place}.function.name", function)
    if not isinstance(function.get("parameters", {}), dict):
        raise _refused(f"{place}.function.parameters", function["parameters"], "a JSON schema")
    return tool


def _read_document(place: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _refused(place, given, "an object")
    return given


def _check_name(place: str, function: Mapping[str, Any]) -> None:
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _refused(place, function.get("name"), "a function's name")


def _items(place: str, given: Any) -> list[tuple[str, Any]]:
    """Return the items of a list, each behind its place; None is an empty one."""
    if not isinstance(given, list | None):
        raise _refused(place, given, "a list")
    if given is not None and len(given) > MAX_ITEMS:
        raise InvalidRequest(
            f"{place} has {len(given):,} items but at most {MAX_ITEMS:,} are allowed"
        )
    return [(f"{place}[{index}]", item) for index, item in enumerate(given or ())]


def _read_object(
    place: str, given: Any, allowed: tuple[str, ...], condition: str = ""
) -> dict[str, Any]:
    """Return the keys that are not null, which must be among those allowed."""
    if not isinstance(given, dict):
        raise _refused(place, given, "an object")
    present = {key: value for key, value in given.items() if value is not None}
    for key in present:
        if key not in allowed:
            raise InvalidRequest(
                f"{place} has key {shown(key)} but allowed{condition} are {', '.join(allowed)}"
            )
    return present


def _refused(place: str, given: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{place} is {shown(given)} but must be {allowed}")
