from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from octavo.local.demo_model import demo_checkpoint
from octavo.text.tokenizer import Tokenizer

_WORDS = ["a", "b", "hello", "hi", ".", ",", "'s", "é", "你", "�", "\0"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _wrap(backend: Backend, **options: Any) -> Tokenizer:
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = [("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "a"), ("ä", "½")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("é→")])
    return _wrap(backend)


_SENTENCE_PIECES = [*_WORDS, "▁", "▁▁", "▁hello", "▁a", "", *_BYTES]


def _llama() -> Tokenizer:
    words = {word: index for index, word in enumerate(_SENTENCE_PIECES)}
    backend = Backend(models.BPE(vocab=words, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _wrap(backend)


def _unigram() -> Tokenizer:
    scored = [(word, -1.0) for word in _SENTENCE_PIECES]
    backend = Backend(models.Unigram(scored, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrap(backend)


def _wordpiece() -> Tokenizer:
    words = [*_WORDS, "##b", "##hello", "##é", "##"]
    backend = Backend(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="a")
    )
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrap(backend)


def _suffix_bpe() -> Tokenizer:
    words = [*_WORDS, "a</w>", "hello</w>", "</w>"]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return _wrap(backend)


def _characters() -> Tokenizer:
    words = {word: index for index, word in enumerate([*_WORDS, " "])}
    backend = Backend(models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return _wrap(backend)


def _no_decoder() -> Tokenizer:
    words = {word: index for index, word in enumerate(_WORDS)}
    return _wrap(Backend(models.WordLevel(words, unk_token="a")))


_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "llama": _llama,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "suffix_bpe": _suffix_bpe,
    "characters": _characters,
    "no_decoder": _no_decoder,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    """One small tokenizer of each kind of decoder."""
    return {name: make() for name, make in _TOKENIZERS.items()}


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(str(demo_checkpoint()))
