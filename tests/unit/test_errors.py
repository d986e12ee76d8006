"""Every exception has its place in the tree and its server code."""

from __future__ import annotations

import inspect

import pytest

from octavo import errors
from octavo.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    LaunchError,
    NotMade,
    NotPaged,
    OctavoError,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
    RequestError,
    code_of,
    shown,
)

CODES = {
    OctavoError: "INTERNAL",
    ConfigError: "INTERNAL",
    NotPaged: "INTERNAL",
    NotMade: "INTERNAL",
    LaunchError: "INTERNAL",
    RequestError: "INVALID_ARG",
    InvalidRequest: "INVALID_ARG",
    PromptTooLong: "INVALID_ARG",
    QueueFull: "UNAVAILABLE",
    RequestCancelled: "CANCELLED",
    EngineError: "INTERNAL",
    EngineDead: "UNAVAILABLE",
}


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_each_error_answers_with_its_code(kind, code):
    assert code_of(kind("message")) == code


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), MemoryError()])
def test_an_error_of_others_is_internal(error):
    assert code_of(error) == "INTERNAL"


def test_a_subclass_made_elsewhere_answers_with_its_base():
    class TooManyStops(InvalidRequest):
        pass

    assert code_of(TooManyStops("x")) == "INVALID_ARG"


def test_the_table_above_knows_every_error():
    defined = {value for value in vars(errors).values() if inspect.isclass(value)}
    assert defined == set(CODES)


def test_the_drawn_tree_is_the_tree():
    drawn = [line.lstrip("│├└─ ").split()[0] for line in errors.__doc__.splitlines()[2:14]]
    assert drawn == [kind.__name__ for kind in CODES]
    assert LaunchError.__base__ is QueueFull.__base__ is EngineError.__base__ is OctavoError
    assert NotPaged.__base__ is NotMade.__base__ is ConfigError
    assert PromptTooLong.__base__ is InvalidRequest.__base__ is RequestError
    assert EngineDead.__base__ is EngineError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (1.5, "1.5"),
        ("x" * 100_000, "'" + "x" * 79),
        (10**5000, "a number of thousands of digits"),
        ([10**5000], "a number of thousands of digits"),
        ("\ud800", r"'\ud800'"),
    ],
    ids=["text", "number", "long text", "long number", "long number in a list", "lone surrogate"],
)
def test_a_shown_value_is_short_and_printable(value, text):
    assert shown(value) == text
