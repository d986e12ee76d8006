"""Values of a request's keys as clients send them: read, checked, and refused by name.

Numbers and booleans may come as strings, for some clients send nothing else. Knows nothing of what
a key means.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.errors import InvalidRequest, shown


def read_json(name: str, text: str) -> Any:
    """Return what JSON says; `name` says in errors whose it is.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from None


def read_json_object(name: str, text: str) -> dict[str, Any]:
    """Return the keys and values of a JSON object.

    Raises:
        InvalidRequest: it is something else.
    """
    values = read_json(name, text)
    if not isinstance(values, dict):
        raise InvalidRequest(f"{name} must be a JSON object, not {type(values).__name__}")
    return values


def read_value(key: str, kind: str, value: object) -> object:
    """Return the value as `kind`, which is the text of a field's type.

    Raises:
        InvalidRequest: it cannot be read as that.
    """
    optional = kind.removesuffix(" | None")
    if value is None and optional != kind:
        return None
    return _READERS[optional](key, value)


def check_range(key: str, value: float, low: float, high: float, allowed: str) -> None:
    """Refuse a number outside [low, high]; `allowed` says what may be given.

    Raises:
        InvalidRequest: names the key, the value and what is allowed.
    """
    if not low <= value <= high:  # NaN fails every comparison
        raise refused(key, value, allowed)


def refused(key: str, value: object, allowed: str) -> InvalidRequest:
    """Return the error that names a key, the value given and what is allowed."""
    return InvalidRequest(f"{key} is {shown(value)} but must be {allowed}")


def _read_float(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refused(key, value, "a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise refused(key, value, "a number") from None


def _read_int(key: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise refused(key, value, "an integer")
    try:
        return int(value)
    except ValueError:
        raise refused(key, value, "an integer") from None


def _read_bool(key: str, value: object) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise refused(key, value, "true or false")
    return value


def _read_string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(key, value, "a string")
    return value


def _read_strings(key: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise refused(key, value, "a string or a list of strings")
    return tuple(dict.fromkeys(items))


def _read_ints(key: str, value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    if set(map(type, items)) == {int}:  # there may be as many as tokens in a vocabulary
        return tuple(dict.fromkeys(items))
    return tuple(dict.fromkeys(_read_int(key, item) for item in items))


def _read_biases(key: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise refused(key, value, "an object of token ids and biases")
    biases = {
        _read_int(f"{key}: a token id", token_id): _read_float(f"{key} of {shown(token_id)}", bias)
        for token_id, bias in pairs
    }
    return tuple(sorted(biases.items()))


_READERS: dict[str, Callable[[str, object], object]] = {
    "float": _read_float,
    "int": _read_int,
    "bool": _read_bool,
    "str": _read_string,
    "tuple[str, ...]": _read_strings,
    "tuple[int, ...]": _read_ints,
    "tuple[tuple[int, float], ...]": _read_biases,
}
