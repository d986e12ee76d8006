"""The JSON objects in which clients send the keys of a request."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest
from octavo.request_keys import read_json_object
from octavo.sampling_params import SamplingParams


def test_an_object_is_read():
    assert read_json_object("x", '{"a": [1, "é"], "b": null}') == {"a": [1, "é"], "b": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys is not valid JSON: Expecting value"),
        ("{", "keys is not valid JSON: Expecting property name"),
        ("{'seed': 1}", "keys is not valid JSON: Expecting property name"),
        ('{"seed": ' + "9" * 5000 + "}", "keys is not valid JSON: Exceeds the limit"),
        ("[" * 100_000, "keys is not valid JSON: maximum recursion depth"),
        ('{"stop": ' + "[" * 100_000, "keys is not valid JSON: maximum recursion"),
        ("[]", "keys must be a JSON object, not list"),
        ("null", "keys must be a JSON object, not NoneType"),
        ('"{}"', "keys must be a JSON object, not str"),
    ],
    ids=range(9),
)
def test_what_is_no_object_is_refused_by_name(text, message):
    with pytest.raises(InvalidRequest) as caught:
        read_json_object("keys", text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": NaN}', "temperature is nan but must be a number in [0, 1,000,000]"),
        ('{"temperature": 1e999}', "temperature is inf but must be a number in [0, 1,000,000]"),
        ('{"top_k": -Infinity}', "top_k is -inf but must be an integer"),
        ('{"seed": ' + "9" * 4000 + "}", "seed is " + "9" * 80 + " but must be a signed 64-bit"),
        ('{"stop": {"a": 1}}', "stop is {'a': 1} but must be a string or a list of strings"),
    ],
    ids=range(5),
)
def test_what_json_allows_and_a_key_does_not_is_refused_by_its_key(text, message):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping(read_json_object("keys", text))
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 250
