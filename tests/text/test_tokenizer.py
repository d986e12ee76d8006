from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.errors import ConfigError, InvalidRequest
from octavo.text.tokenizer import Tokenizer

#: What llama.cpp's own tokenizer makes of the same GGUF file, special tokens recognised.
LLAMA_CPP_IDS = {
    "12345": [33, 34, 35, 36, 37],
    "a1b22": [81, 33, 82, 34, 34],
    "3.14": [35, 30, 33, 36],
    "1,000,000": [33, 28, 32, 32, 32, 28, 32, 32, 32],
    "½²": [16738, 19133],
    "٣٤٥": [164, 113, 164, 114, 164, 115],
    "It's we'll I'M don't": [1589, 506, 392, 3060, 339, 23, 61, 1326, 982],
    "they've you're I'd": [11518, 3543, 346, 2316, 339, 6737],
    "  two  spaces": [216, 827, 216, 5600],
    "\ttab\n\nlines\r\n": [197, 15999, 198, 198, 5110, 2738],
    "   ": [333],
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
    "if (a != b) { c += 0x1F; }": (
        [342, 365, 81, 6541, 278, 25, 1662, 265, 4519, 216, 32, 104, 33, 54, 43, 4029]
    ),
    "你好\uff0c世界": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230],
    "東京タワー": [30679, 126, 16736, 122, 10391, 140, 11100, 124, 35130],
    "안녕하세요": ([183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238]),
    "😀": [10813, 242, 218],
    "👩\u200d👩\u200d👧": ([10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]),
    "🇫🇷": [10813, 225, 121, 10813, 225, 132],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "<|endoftext|>": [0],
    "<repo_name>x<file_sep>y": [3, 104, 5, 105],
    "naïve café": [3546, 46494, 37366],
    "Привет": [155, 249, 46879, 16464, 32547],
    "שלום": [38229, 31838, 23970, 162, 247],
    "e\u0301": [85, 151, 219],
    "a\u200bb": [81, 321, 229, 82],
    "": [],
}
#: The vocabulary has no token for six control characters, nor for planes 4 to 11 (unassigned).
CHARACTERS = st.characters(
    codec="utf-8",
    exclude_characters="\0\x04\x06\x13\x14\x16\x1d",
    exclude_categories=["Cn", "Cs"],
)


@pytest.mark.parametrize("text", LLAMA_CPP_IDS)
def test_the_demo_tokenizer_gives_the_ids_of_llama_cpp(
    text: str, demo_tokenizer: Tokenizer
) -> None:
    assert demo_tokenizer.encode(text) == LLAMA_CPP_IDS[text]


@given(text=st.text(CHARACTERS))
@settings(max_examples=500, deadline=None)
def test_every_text_round_trips(text: str, demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode(text)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_decode_skips_special_tokens_and_ids_without_a_token(demo_tokenizer: Tokenizer) -> None:
    ids = [1, *demo_tokenizer.encode("Hi"), 2, -1, 49152, 2**40]
    assert demo_tokenizer.decode(ids) == "Hi"
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>Hi<|im_end|>"


def test_decode_keeps_the_spaces_that_clean_up_would_change(
    tokenizers: dict[str, Tokenizer],
) -> None:
    backend = Backend(models.WordLevel({"hi": 0, ".": 1}, unk_token="hi"))
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert hf.decode([0, 1]) == "hi."
    assert Tokenizer(hf).decode([0, 1]) == "hi ."


def test_a_lone_surrogate_is_refused_with_its_place(demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D83D at character 2;"):
        demo_tokenizer.encode("hi\ud83d")


def test_the_demo_tokenizer_knows_its_size_and_end(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.eos_token_ids == {2}
    assert demo_tokenizer.has_chat_template


@pytest.fixture
def saved(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> Path:
    """A directory with a tokenizer whose own end token is </s>, and nothing else."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers["byte_level"].hf.backend_tokenizer, eos_token="</s>"
    )
    hf.save_pretrained(tmp_path)
    return tmp_path


def test_end_ids_come_from_the_tokenizer_when_it_stands_alone(saved: Path) -> None:
    tokenizer = Tokenizer.load(str(saved))
    assert tokenizer.eos_token_ids == {tokenizer.hf.convert_tokens_to_ids("</s>")}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ids", [5, [5, 7]])
def test_end_ids_of_the_model_are_added_to_those_of_the_tokenizer(
    name: str, ids: int | list[int], saved: Path
) -> None:
    own = Tokenizer.load(str(saved)).eos_token_ids
    (saved / name).write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}))
    wanted = {5} if ids == 5 else {5, 7}
    assert Tokenizer.load(str(saved)).eos_token_ids == own | wanted


def test_the_first_token_of_the_tokenizer_can_be_left_out(
    tokenizers: dict[str, Tokenizer],
) -> None:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers["byte_level"].hf.backend_tokenizer,
        bos_token="<s>",
        add_bos_token=True,
    )
    tokenizer = Tokenizer(hf)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [hf.bos_token_id, *plain]


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Tokenizer.load(str(tmp_path))
    assert str(refused.value) == (
        f"no tokenizer can be loaded from {str(tmp_path)!r}: there is no tokenizer.json in it"
    )


def test_a_tokenizer_that_cannot_be_read_is_told_of_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as refused:
        Tokenizer.load(str(tmp_path))
    assert str(refused.value) == (
        f"no tokenizer can be loaded from {str(tmp_path)!r}: JSONDecodeError: Expecting property "
        "name enclosed in double quotes: line 1 column 2 (char 1)"
    )


UNKNOWABLE = {
    "ByteLevel, Strip": [decoders.ByteLevel(), decoders.Strip(" ", 0, 1)],
    "Fuse, ByteLevel": [decoders.Fuse(), decoders.ByteLevel()],
    "Fuse, Replace": [decoders.Fuse(), decoders.Replace("ab", "c")],
    "Fuse, Sequence, Strip": [decoders.Fuse(), decoders.Sequence([decoders.Strip(" ", 0, 1)])],
    "CTC": [decoders.CTC()],
}


@pytest.mark.parametrize("names", UNKNOWABLE)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(names: str) -> None:
    backend = Backend(models.WordLevel({"hi": 0}, unk_token="hi"))
    backend.decoder = decoders.Sequence(UNKNOWABLE[names])
    shown = names.replace("Sequence, ", "")
    with pytest.raises(ConfigError, match=f"decoder of {shown} is not supported"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_truncation_and_padding_of_the_checkpoint_are_left_out() -> None:
    backend = Backend(models.WordLevel({"hi": 0, "[PAD]": 1}, unk_token="hi"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=5, pad_id=1)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("hi hi hi") == [0, 0, 0]


def test_the_longest_token_bounds_how_much_text_a_token_holds(demo_tokenizer: Tokenizer) -> None:
    length = demo_tokenizer.max_token_length
    assert length == 81
    for text in (" " * 10_000, "=" * 10_000, "-" * 10_000, "word " * 2000):
        assert len(demo_tokenizer.encode(text)) * length >= len(text)
