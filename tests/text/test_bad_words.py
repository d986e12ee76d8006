"""Bad words as token ids: without and with a space before them, as the tokenizer spells them."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest
from octavo.text.bad_words import bad_words_token_ids


@pytest.fixture
def spell(tokenizers, demo_tokenizer):
    """Return the bad words of a tokenizer as its pieces, joined by bars."""

    def spell_words(name, *words, ends=()):
        tokenizer = demo_tokenizer if name == "demo" else tokenizers[name]
        sequences = bad_words_token_ids(words, tokenizer, ends)
        return ["|".join(tokenizer.piece(i, False) for i in ids) for ids in sequences]

    return spell_words


@pytest.mark.parametrize(
    ("name", "word", "spellings"),
    [
        ("demo", "London", ["London", "ĠLondon"]),
        ("demo", " London", ["London", "ĠLondon"]),
        ("demo", "unbelievably", ["un|belie|v|ably", "Ġunbelie|v|ably"]),
        ("demo", "New York", ["New|ĠYork", "ĠNew|ĠYork"]),
        ("demo", "\n", ["Ċ", "ĠĊ"]),
        ("demo", " ", ["Ġ", "ĠĠ"]),
        ("byte_level", "a", ["a", "Ġa"]),
        ("byte_level", "é", ["Ã|©", "Ġ|Ã|©"]),
        ("unigram", "hello", ["▁hello"]),
        ("wordpiece", "hello", ["hello"]),
        ("no_decoder", "hi", ["hi"]),
    ],
)
def test_a_word_is_spelt_with_and_without_a_space(spell, name, word, spellings):
    assert spell(name, word) == spellings


def test_the_same_spelling_counts_once(spell):
    assert spell("demo", "London", " London", "London Bridge") == [
        "London",
        "ĠLondon",
        "London|ĠBridge",
        "ĠLondon|ĠBridge",
    ]
    assert spell("demo") == []


def test_an_end_of_text_by_itself_may_be_generated(spell):
    assert spell("demo", "<|im_end|>", ends=(2,)) == ["Ġ|<|im_end|>"]
    assert spell("demo", "<|im_end|>") == ["<|im_end|>", "Ġ|<|im_end|>"]


@pytest.mark.parametrize(("name", "word"), [("demo", "\ud83d"), ("wordpiece", "king")])
def test_what_cannot_be_spelt_is_refused(spell, name, word):
    with pytest.raises(InvalidRequest, match=r"^bad_words has '.*', which this model cannot spell"):
        spell(name, "a", word)
