"""SentencePiece vocabularies of GGUF files; the pieces were compared with llama.cpp's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from transformers import AutoTokenizer

from octavo.errors import ConfigError
from octavo.model.gguf_checkpoint import convert_gguf

MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]
NORMAL, CONTROL, USER = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
#: With the best first; a single letter is worth least.
PIECES = ["▁t", "he", "▁the", "hi", "▁hi", "▁", "t", "h", "e", "i"]
OWN = {"<tool>": USER, "  ": USER, "<end_of_turn>": CONTROL, "<|end|>": CONTROL}
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, *OWN]
TYPES = [TokenType.UNKNOWN, CONTROL, CONTROL, *[TokenType.BYTE] * 256, *[NORMAL] * 10]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(10)] + [-1000.0] * 4,
    "tokenizer.ggml.token_type": [int(kind) for kind in [*TYPES, *OWN.values()]],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
GEMMA = {"tokenizer.ggml.add_space_prefix": False}


@pytest.fixture
def convert(make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path) -> Callable[..., Any]:
    """Convert a file of a case with that vocabulary; return its tokenizer."""

    def make(case: str, metadata: dict[str, Any]) -> Any:
        model = make_model(case, vocab_size=len(TOKENS))
        convert_gguf(make_gguf(VOCABULARY | metadata, model), tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)

    return make


@pytest.mark.parametrize(
    ("case", "metadata", "text", "pieces"),
    [
        ("mistral", {}, "the hi", "<s> ▁the ▁hi"),
        ("mistral", {}, "hit<tool>he", "<s> ▁hi t <tool> ▁ he"),
        ("mistral", {}, "é", "<s> ▁ <0xC3> <0xA9>"),
        ("mistral", {"tokenizer.ggml.add_bos_token": False}, "the hi", "▁the ▁hi"),
        ("gemma2", GEMMA, "the hi", "<s> t he ▁hi"),
        ("gemma2", GEMMA, "hi  <tool>he", "<s> hi ▁▁ <tool> he"),
        ("phi3", {}, "hi<|end|>  he", "<s> ▁hi <|end|> ▁ he"),
    ],
)
def test_a_text_becomes_the_pieces_of_llama_cpp(
    case: str, metadata: dict[str, Any], text: str, pieces: str, convert: Callable[..., Any]
) -> None:
    tokenizer = convert(case, metadata)
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces.split(" ")


def test_pieces_become_the_text_again_and_the_end_of_a_turn_ends_it(
    convert: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = convert("gemma2", GEMMA)
    ids = tokenizer.encode("the hié  t<tool><end_of_turn>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the hié  t<tool>"
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["</s>", "<|end|>", "<end_of_turn>"]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tokenizer.ggml.scores": [0.0, 1.0]}, "273 tokens but 2 scores"),
        ({"tokenizer.ggml.scores": None}, "has no 'tokenizer.ggml.scores'"),
        ({"tokenizer.ggml.bos_token_id": None}, "wants a bos token added but names none"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "more"]}, "274 tokens, .* and 273 types"),
    ],
)
def test_a_vocabulary_that_disagrees_with_itself_is_refused(
    metadata: dict[str, Any], reason: str, convert: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=reason):
        convert("mistral", metadata)
