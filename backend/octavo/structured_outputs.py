"""The form that an answer must have, as a request says it: read, checked, and refused by name.

Knows nothing of how it is enforced, nor whether a schema, a pattern or a grammar makes sense.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import InvalidRequest, shown
from octavo.request_keys import read_json_object, read_value, refused

#: Bytes of a schema, a pattern, a grammar, or of all choices together.
MAX_BYTES = 262_144
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must be; the same form in the same spelling is equal."""

    kind: str
    """`json` (a schema), `regex`, `choice`, `grammar` (EBNF) or `json_object`."""
    text: str
    """What is to be followed: a schema and choices as JSON, empty for `json_object`."""

    @classmethod
    def from_value(cls, key: str, value: object) -> StructuredOutputs:
        """Read an object that has one of the kinds as its key, or the JSON of one.

        Keys of null or false count as absent: vLLM's clients name all the options that they know.

        Raises:
            InvalidRequest: it is something else; `key` says in the message what it is.
        """
        if isinstance(value, StructuredOutputs):
            return value
        values = read_json_object(key, value) if isinstance(value, str) else value
        if not isinstance(values, dict):
            raise refused(key, value, f"an object with one of {_KINDS}")
        given = [
            kind for kind, content in values.items() if not (content is None or content is False)
        ]
        for kind in given:
            if kind not in _READERS:
                raise InvalidRequest(f"{key} has key {shown(kind)} but allowed are {_KINDS}")
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequest(f"{key} has {found} but must have one of {_KINDS}")
        (kind,) = given
        name = f"{key}.{kind}"
        return cls(kind, _checked_size(name, _READERS[kind](name, values[kind])))


def _checked_size(name: str, text: str) -> str:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} has a lone surrogate but must be Unicode text") from None
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(f"{name} has {num_bytes:,} bytes but at most {MAX_BYTES:,} may be")
    return text


def _read_schema(name: str, value: object) -> str:
    schema = read_json_object(name, value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise refused(name, value, "a JSON schema")
    try:
        # The order of its properties is that of the answer's, so it is kept.
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        raise refused(name, value, "a JSON schema") from None


def _read_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise refused(name, value, "a string of at least one character")
    return value


def _read_choices(name: str, value: object) -> str:
    choices = read_value(name, "tuple[str, ...]", value)
    assert isinstance(choices, tuple)
    if not choices or "" in choices:
        raise refused(name, value, "a list of at least one string, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"{name} has {len(choices):,} strings but at most {MAX_CHOICES:,} are allowed"
        )
    return json.dumps(choices, ensure_ascii=False)


def _read_json_object(name: str, value: object) -> str:
    if not read_value(name, "bool", value):
        raise refused(name, value, "true")
    return ""


_READERS: dict[str, Callable[[str, object], str]] = {
    "json": _read_schema,
    "regex": _read_text,
    "choice": _read_choices,
    "grammar": _read_text,
    "json_object": _read_json_object,
}
_KINDS = ", ".join(_READERS)
