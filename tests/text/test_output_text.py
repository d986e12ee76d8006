"""The text of one answer: what its parameters make of the tokens, whatever the steps they come in.

Each character below is a token, and brackets are the special tokens `<s>` and `</s>`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.text.output_text import OutputText, TextDelta
from octavo.text.tokenizer import Tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
KEPT = {"skip_special_tokens": False}
SHOWN = {"include_stop_str_in_output": True}


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    vocabulary = tokenizer.hf.get_vocab()
    ids = {"[": vocabulary["<s>"], "]": vocabulary["</s>"], " ": vocabulary["Ġ"]}
    return [ids[char] if char in ids else vocabulary[char] for char in text]


def answer(
    tokenizer: Tokenizer, text: str, reason: FinishReason, **params: Any
) -> tuple[str, int, FinishReason | None]:
    """Return the text, how many tokens count and why it ended, for one token a step."""
    output = OutputText(tokenizer, [], SamplingParams(**params))
    ids = ids_of(tokenizer, text)
    deltas: list[TextDelta] = []
    for index, token_id in enumerate(ids):
        deltas.append(output.push([token_id], reason if index == len(ids) - 1 else None))
        if deltas[-1].finish_reason is not None:
            break
    num_tokens = sum(delta.num_tokens for delta in deltas)
    return "".join(delta.text for delta in deltas), num_tokens, deltas[-1].finish_reason


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "hi"),
        (KEPT, "<s>hi"),
        (SHOWN, "hi"),
        (KEPT | SHOWN, "<s>hi</s>"),
    ],
    ids=["neither", "special kept", "end shown", "both"],
)
def test_the_token_that_ends_an_answer_has_text_when_it_is_kept_and_asked_for(
    tokenizer: Tokenizer, params: dict[str, bool], text: str
) -> None:
    assert answer(tokenizer, "[hi]", STOP, **params) == (text, 4, STOP)


@pytest.mark.parametrize(("params", "text"), [({}, "ab"), (SHOWN, "abc")])
def test_an_ordinary_stop_token_has_text_when_that_is_asked_for(
    tokenizer: Tokenizer, params: dict[str, bool], text: str
) -> None:
    assert answer(tokenizer, "abc", STOP, **params) == (text, 3, STOP)


def test_a_special_token_at_the_limit_of_length_is_text_like_any_other(
    tokenizer: Tokenizer,
) -> None:
    assert answer(tokenizer, "hi[", LENGTH, **KEPT) == ("hi<s>", 3, LENGTH)
    assert answer(tokenizer, "hi[", LENGTH) == ("hi", 3, LENGTH)


@pytest.mark.parametrize(("params", "text"), [({}, "one "), (SHOWN, "one END")])
def test_a_stop_string_over_several_tokens_ends_the_text(
    tokenizer: Tokenizer, params: dict[str, bool], text: str
) -> None:
    assert answer(tokenizer, "one END two", LENGTH, stop="END", **params) == (text, 7, STOP)


def test_a_stop_string_is_found_in_the_text_of_special_tokens_that_are_kept(
    tokenizer: Tokenizer,
) -> None:
    stop = "a</s>b"
    assert answer(tokenizer, "xa]b", LENGTH, stop=stop, **KEPT) == ("x", 4, STOP)
    assert answer(tokenizer, "xa]b", LENGTH, stop=stop) == ("xab", 4, LENGTH)


def test_a_stop_string_that_the_shown_end_completes_is_cut_like_any_other(
    tokenizer: Tokenizer,
) -> None:
    params = {**KEPT, **SHOWN, "stop": "i<"}
    assert answer(tokenizer, "hi]", STOP, **params) == ("hi<", 3, STOP)


@pytest.mark.parametrize(("params", "text"), [({}, "x.y"), (SHOWN, "x.y.")])
def test_stop_strings_before_min_tokens_pass_and_are_not_found_later(
    tokenizer: Tokenizer, params: dict[str, bool], text: str
) -> None:
    found = answer(tokenizer, "x.y.z", LENGTH, stop=".", min_tokens=3, **params)
    assert found == (text, 4, STOP)


def test_a_stop_string_that_begins_before_min_tokens_is_not_found(tokenizer: Tokenizer) -> None:
    found = answer(tokenizer, "xEND END", LENGTH, stop="END", min_tokens=3)
    assert found == ("xEND ", 8, STOP)


def test_text_held_back_for_a_stop_string_comes_with_the_end(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, [], SamplingParams(stop="END"))
    assert output.push(ids_of(tokenizer, "xEN")).text == "x"
    assert output.push([], LENGTH).text == "EN"


@given(
    text=st.text("ab.[]", min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.lists(st.text("ab.<", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 6),
    flags=st.fixed_dictionaries(
        {
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "spaces_between_special_tokens": st.booleans(),
        }
    ),
    reason=st.sampled_from([STOP, LENGTH]),
)
@settings(max_examples=500, deadline=None)
def test_an_answer_does_not_depend_on_how_its_tokens_come(
    text: str,
    cuts: list[int],
    stop: list[str],
    min_tokens: int,
    flags: dict[str, bool],
    reason: FinishReason,
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    params = {"stop": stop, "min_tokens": min_tokens, **flags}
    ids = ids_of(tokenizer, text)
    ends = [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    output = OutputText(tokenizer, [], SamplingParams(**params))
    whole, num_tokens, start = "", 0, 0
    for end in ends:
        is_last = end == len(ids)
        delta = output.push(ids[start:end], reason if is_last else None)
        whole, num_tokens, start = whole + delta.text, num_tokens + delta.num_tokens, end
        if delta.finish_reason is not None:
            break
    assert (whole, num_tokens, delta.finish_reason) == answer(tokenizer, text, reason, **params)
