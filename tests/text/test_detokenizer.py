from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

KINDS = "byte_level llama unigram wordpiece suffix_bpe characters no_decoder".split()
WITH_BYTE_TOKENS = ["llama", "unigram"]
JOINED_BY_SPACES = ["wordpiece", "no_decoder"]


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[piece] for piece in pieces]


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], **options: bool
) -> list[str]:
    """Return the delta of each token, and then what `finish` gives."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    any_id = st.integers(-2, tokenizer.vocab_size + 3)
    if tokenizer.byte_fallback:
        # Rows of bytes that are sometimes whole characters.
        texts = st.sampled_from(["é", "你", "😀"]).map(
            lambda text: ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))
        )
        parts = data.draw(st.lists(st.one_of(any_id.map(lambda token_id: [token_id]), texts)))
        return [token_id for part in parts for token_id in part]
    return data.draw(st.lists(any_id))


def byte_pieces(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return ids of one byte each."""
    if tokenizer.byte_level:
        return ids_of(tokenizer, *(bytes_to_unicode()[byte] for byte in data))
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in data))


def ends_in_a_byte(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> bool:
    """Whether a character may begin in the prompt and end behind it, or the last id has no text."""
    piece = tokenizer.piece(prompt[-1], skip)
    return piece is None or (tokenizer.byte_fallback and piece.startswith("<0x"))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_joined_deltas_equal_the_whole_decode(
    kind: str, data: st.DataObject, skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    # A character that spans the prompt's end is tested for itself below.
    while prompt and ends_in_a_byte(tokenizer, prompt, skip):
        prompt.pop()
    if kind == "byte_level":
        prompt = []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    deltas = [
        detokenizer.push(ids[start:end])
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    whole = tokenizer.decode(prompt + ids, skip)[len(tokenizer.decode(prompt, skip)) :]
    assert "".join([*deltas, detokenizer.finish()]) == whole


@pytest.mark.parametrize("kind", ["byte_level", *WITH_BYTE_TOKENS])
@given(data=st.data(), beginning=st.sampled_from([b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x98"]))
@settings(max_examples=200, deadline=None)
def test_behind_half_a_character_comes_what_the_whole_decode_has_beyond_the_prompts(
    kind: str, data: st.DataObject, beginning: bytes, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = ids_of(tokenizer, "a") + byte_pieces(tokenizer, beginning)
    first = data.draw(st.lists(st.sampled_from([0x80, 0x98, 0xA9, 0xBF, 0xE4]), max_size=3))
    ids = byte_pieces(tokenizer, bytes(first)) + draw_ids(data, tokenizer)
    whole = tokenizer.decode(prompt + ids)
    pairs = zip(tokenizer.decode(prompt), whole, strict=False)
    num_shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    assert "".join(stream(tokenizer, prompt, ids)) == whole[num_shared:]


BYTES_THAT_NEARLY_FIT = [0x00, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xEF]
BYTES_THAT_NEARLY_FIT += [0xF0, 0xF3, 0xF4, 0xF5, 0xFF, 0x8F, 0x90]


@given(data=st.lists(st.sampled_from(BYTES_THAT_NEARLY_FIT)))
@settings(max_examples=1000, deadline=None)
def test_byte_level_tokens_read_as_utf8_with_replacement(
    data: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["byte_level"]
    char_of = bytes_to_unicode()
    ids = ids_of(tokenizer, *(char_of[byte] for byte in data))
    text = "".join(stream(tokenizer, [], ids))
    assert text == bytes(data).decode(errors="replace").replace("\0", "�")
    assert text == tokenizer.decode(ids)


def test_a_character_comes_out_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = ids_of(tokenizer, "ðŁĺ", "Ģ", "ä½", "ł", "a")
    assert stream(tokenizer, [], ids) == ["", "😀", "", "你", "a", ""]


def test_bytes_that_are_no_character_come_out_once_that_is_certain(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = ids_of(tokenizer, "ä", "½", "a", "ÿ", "ä")
    assert stream(tokenizer, [], ids) == ["", "", "�a", "�", "", "�"]


@pytest.mark.parametrize("kind", WITH_BYTE_TOKENS)
def test_a_row_of_byte_tokens_comes_out_when_it_ends(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    good = ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>", "hi")
    assert stream(tokenizer, [], good) == ["", "", "", "你hi", ""]
    bad = ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "hi")
    assert stream(tokenizer, [], bad) == ["", "", "", "", "����hi", ""]
    assert stream(tokenizer, [], good[:2])[-1] == "��"


@pytest.mark.parametrize("kind", ["byte_level", *WITH_BYTE_TOKENS])
def test_a_character_that_the_prompt_began_comes_out_when_it_is_finished(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    data = byte_pieces(tokenizer, "你😀".encode())
    (a,) = ids_of(tokenizer, "a")
    assert "".join(stream(tokenizer, data[:4], [*data[4:], a])) == "😀a"
    assert "".join(stream(tokenizer, data[:3], [*data[3:], a])) == "😀a"
    assert "".join(stream(tokenizer, data[:1], [*data[1:], a])) == "你😀a"


@pytest.mark.parametrize("kind", ["byte_level", *WITH_BYTE_TOKENS])
def test_a_character_that_only_the_prompt_began_is_left_to_the_prompt(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = byte_pieces(tokenizer, "你".encode()[:2])
    (a,) = ids_of(tokenizer, "a")
    assert stream(tokenizer, prompt, [a, a]) == ["a", "a", ""]
    assert stream(tokenizer, prompt, []) == [""]


@pytest.mark.parametrize("kind", WITH_BYTE_TOKENS)
def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_a_beginning(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    first, hello, start = ids_of(tokenizer, "a", "▁hello", "<s>")
    assert stream(tokenizer, [first], [hello, hello]) == [" hello", " hello", ""]
    assert stream(tokenizer, [start], [hello, hello]) == ["hello", " hello", ""]
    assert stream(tokenizer, [start], [hello, start, hello]) == ["hello", "", " hello", ""]


@pytest.mark.parametrize("context", [["a", ""], ["a", "<0xE4>"], ["a", "", "<s>"]])
def test_a_leading_space_is_kept_after_tokens_that_hide_the_text_before(
    context: list[str], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["llama"]
    ids = ids_of(tokenizer, "▁hello")
    assert "".join(stream(tokenizer, ids_of(tokenizer, *context), ids)) == " hello"


def test_a_beginning_lasts_until_there_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama"]
    empty, space, hello = ids_of(tokenizer, "", "▁", "▁hello")
    assert stream(tokenizer, [], [empty, hello, hello]) == ["", "hello", " hello", ""]
    assert stream(tokenizer, [], [space, hello]) == ["", " hello", ""]
    assert stream(tokenizer, [empty], [empty, hello]) == ["", "hello", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_unknown_ids_give_no_text(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    ids = [*ids_of(tokenizer, "<s>", "</s>"), -1, tokenizer.vocab_size, 2**31, 2**40]
    assert stream(tokenizer, [], ids) == [""] * (len(ids) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_kept_have_the_text_of_the_whole_decode(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    ids = ids_of(tokenizer, "<s>", "a", "</s>", "<s>")
    space = " " if kind in JOINED_BY_SPACES else ""
    deltas = stream(tokenizer, [], ids, skip_special_tokens=False)
    assert deltas == ["<s>", space + "a", space + "</s>", space + "<s>", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_without_spaces_special_tokens_in_a_row_follow_each_other_at_once(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    ids = ids_of(tokenizer, "a", "</s>", "<s>", "<s>", "a")
    space = " " if kind in JOINED_BY_SPACES else ""
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    deltas = stream(tokenizer, [], ids, **options)
    assert deltas == ["a", space + "</s>", "<s>", "<s>", space + "a", ""]
    skipped = stream(tokenizer, [], ids, spaces_between_special_tokens=False)
    assert skipped == ["a", "", "", "", space + "a", ""]


@pytest.mark.parametrize("kind", ["llama", "wordpiece", "no_decoder"])
def test_a_nul_comes_out_as_the_replacement_character(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    ids = ids_of(tokenizer, "hi", "\0")
    assert "\0" in tokenizer.hf.decode(ids)
    assert "".join(stream(tokenizer, [], ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith("�")


class CountingTokenizer(Tokenizer):
    num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("pieces", [["▁hello"], ["▁"], ["<0xFF>"], ["<0xE4>", "hi"], ["▁", "<s>"]])
def test_each_token_is_decoded_a_bounded_number_of_times(
    pieces: list[str], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer: Any = CountingTokenizer(tokenizers["llama"].hf)
    ids = ids_of(tokenizer, *pieces) * 2000
    prompt = ids_of(tokenizer, "a") * 2000
    assert tokenizer.plain_token_id is not None
    tokenizer.num_decoded = 0
    assert "".join(stream(tokenizer, prompt, ids)) != ""
    assert tokenizer.num_decoded <= 5 * len(ids) + 64


@pytest.mark.parametrize(
    "text", ["Hello, wörld!", "你好。世界", "👩‍👩‍👧 🇫🇷", "def f():\n\treturn 'x'", "हिन्दी שלום"]
)
def test_the_demo_tokenizer_streams_every_script(text: str, demo_tokenizer: Tokenizer) -> None:
    deltas = stream(demo_tokenizer, [], demo_tokenizer.encode(text))
    assert "".join(deltas) == text
    assert all("�" not in delta for delta in deltas)
