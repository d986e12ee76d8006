"""A name that no adapter has is refused, with the names that are there."""

from __future__ import annotations

import re

import pytest

from octavo.adapter import Adapter, find_adapter
from octavo.errors import InvalidRequest

FIRST, SECOND = Adapter(0, b"first"), Adapter(1, b"second")


def test_an_adapter_is_found_by_its_name():
    assert find_adapter("b", {"a": FIRST, "b": SECOND}) is SECOND
    assert find_adapter(None, {"a": FIRST}) is None
    assert find_adapter(None, {}) is None


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        ("ba", "one of 'a', 'b'"),
        ("abcdefghij", "one of 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j'"),
        ("klabcdefghij", "one of 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j' or 2 others"),
        ("", "absent, for the model was loaded without adapters (option enable_lora)"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(names, allowed):
    with pytest.raises(
        InvalidRequest, match=f"^lora_name is 'x' but must be {re.escape(allowed)}$"
    ):
        find_adapter("x", dict.fromkeys(names, FIRST))


def test_a_name_of_any_length_is_shown_short():
    with pytest.raises(InvalidRequest) as caught:
        find_adapter("x" * 1_000_000, {"a": FIRST})
    assert len(str(caught.value)) < 200
