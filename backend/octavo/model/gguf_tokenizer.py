"""A tokenizer rebuilt from the vocabulary, merges and pre-tokeniser name of a GGUF file.

transformers' own GGUF reading ignores the pre-tokeniser name, so digits come out glued together.
Knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from octavo.errors import ConfigError
from octavo.model.gguf_metadata import GgufFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(digits: str) -> Any:
    pattern = Regex(f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


#: What `tokenizer.ggml.pre` names: how text is cut before merging.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits_then_gpt2,
    "llama-bpe": lambda: _split_by(r"\p{N}{1,3}"),
    "qwen2": lambda: _split_by(r"\p{N}"),
}
_MATCHED_IN_TEXT = (TokenType.CONTROL, TokenType.USER_DEFINED)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the byte-level BPE tokenizer that `file` describes.

    Raises:
        ConfigError: the tokenizer's kind or pre-tokeniser is unknown, or its lists disagree.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"GGUF tokenizer model {kind!r} is not supported; allowed is 'gpt2'")
    pre = file.get("tokenizer.ggml.pre", "absent")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"GGUF pre-tokeniser {pre!r} is not supported; allowed are {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not len(tokens) == len(types) == len(vocabulary):
        raise ConfigError(
            f"GGUF vocabulary has {len(tokens):,} tokens, {len(vocabulary):,} of them distinct, "
            f"and {len(types):,} types; the three must be equal"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    # Llama 3 takes a whole word that is in the vocabulary before it tries any merge.
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == TokenType.CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in _MATCHED_IN_TEXT
        ]
    )
    if file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = _begin_with_bos(file, tokens)
    return tokenizer


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to `directory`."""
    build_tokenizer(file).save(str(directory / "tokenizer.json"))
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.get('general.architecture')}.context_length"),
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for gguf_name, name in names.items():
        token = _named_token(file, tokens, gguf_name)
        if token is not None:
            config[f"{name}_token"] = token
    template = file.get("tokenizer.chat_template", None)
    if template is not None:
        config["chat_template"] = template
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _begin_with_bos(file: GgufFile, tokens: list[str]) -> Any:
    bos = _named_token(file, tokens, "bos")
    if bos is None:
        raise ConfigError(f"{file.path.name} wants a bos token added but names none")
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokens.index(bos))],
    )


def _named_token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    index = file.get(f"tokenizer.ggml.{name}_token_id", None)
    if index is None:
        return None
    if index >= len(tokens):
        raise ConfigError(f"GGUF {name} token is {index} but the vocabulary has {len(tokens):,}")
    return tokens[int(index)]
