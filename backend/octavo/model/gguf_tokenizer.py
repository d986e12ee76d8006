"""A tokenizer rebuilt from the vocabulary of a GGUF file: of bytes, or of SentencePiece's pieces.

transformers' own GGUF reading ignores names of pre-tokenisers that it does not know, so digits come
out glued together. Knows nothing of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from octavo.errors import ConfigError
from octavo.model.gguf_metadata import GgufFile
from octavo.model.gguf_pre_tokenizers import PRE_TOKENIZERS

_SPACE = "▁"
#: Far beyond any piece: each of its cuts is looked up.
_LONGEST_PIECE = 512
_MATCHED_IN_TEXT = (TokenType.CONTROL, TokenType.USER_DEFINED)
_MERGED = (TokenType.NORMAL, TokenType.USER_DEFINED)
#: Control tokens of Phi 3 that leave alone what stands behind them.
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    """By their ids."""
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def build_tokenizer(file: GgufFile, most_tokens: int) -> Tokenizer:
    """Build the tokenizer that `file` describes, of at most `most_tokens` tokens.

    Raises:
        ConfigError: the tokenizer's kind or pre-tokeniser is unknown, or its lists disagree.
    """
    kind = file.text("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ConfigError(
            f"GGUF tokenizer model {kind!r} is not supported; allowed are {', '.join(builders)}"
        )
    vocabulary = _vocabulary(file, most_tokens)
    tokenizer, begins_text = builders[kind](file, vocabulary)
    if file.flag("tokenizer.ggml.add_eos_token", False):
        raise ConfigError("GGUF metadata has tokenizer.ggml.add_eos_token, which ends all prompts")
    if file.flag("tokenizer.ggml.add_bos_token", begins_text):
        tokenizer.post_processor = _begin_with_bos(file, vocabulary.tokens)
    return tokenizer


def write_tokenizer(file: GgufFile, tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = file.items("tokenizer.ggml.tokens", str)
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer(".context_length"),
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for gguf_name, name in names.items():
        token = _named_token(file, tokens, gguf_name)
        if token is not None:
            config[f"{name}_token"] = token
    template = file.text("tokenizer.chat_template", None)
    if template is not None:
        config["chat_template"] = template
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _vocabulary(file: GgufFile, most_tokens: int) -> _Vocabulary:
    tokens = file.items("tokenizer.ggml.tokens", str)
    types = file.items("tokenizer.ggml.token_type", int)
    distinct = len(set(tokens))
    if not len(tokens) == len(types) == distinct:
        raise ConfigError(
            f"GGUF vocabulary has {len(tokens):,} tokens, {distinct:,} of them distinct, "
            f"and {len(types):,} types; the three must be equal"
        )
    if len(tokens) > most_tokens:
        raise ConfigError(
            f"GGUF vocabulary has {len(tokens):,} tokens, more than the {most_tokens:,} rows of "
            "token_embd.weight"
        )
    for name in ("bos", "eos", "unknown", "padding"):
        _named_token(file, tokens, name)
    return _Vocabulary(tokens, types)


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of bytes, and whether texts begin with a token where nothing is said."""
    name = file.text("tokenizer.ggml.pre", "absent")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"GGUF pre-tokeniser {name!r} is not supported; allowed are {', '.join(PRE_TOKENIZERS)}"
        )
    if name != "qwen2" and file.text("general.architecture") == "qwen2":
        # transformers takes no tokenizer of this architecture but its own.
        raise ConfigError(f"GGUF pre-tokeniser of qwen2 is {name!r} but must be 'qwen2'")
    pre = PRE_TOKENIZERS[name]
    pairs = (merge.partition(" ") for merge in file.items("tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.takes_whole_words)
    )
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == TokenType.CONTROL, normalized=False)
            for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token_type in _MATCHED_IN_TEXT
        ]
    )
    return tokenizer, pre.begins_text


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of pieces, and that texts begin with a token where nothing is said."""
    is_gemma = file.text("general.architecture").startswith("gemma")
    # Runs of spaces are pieces among others, written in another way.
    tokens = [
        _SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token
        for token in vocabulary.tokens
    ]
    scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ConfigError(f"GGUF vocabulary has {len(tokens):,} tokens but {len(scores):,} scores")
    pieces = _Vocabulary(tokens, vocabulary.types)
    unknown = _named_token(file, tokens, "unknown")
    has_bytes = vocabulary.types.count(TokenType.BYTE) == 256
    tokenizer = Tokenizer(
        models.BPE(
            vocab=pieces.ids,
            # Gemma's scores are not in the order in which its pieces were merged; its ids are.
            merges=_merges(pieces, [-float(i) for i in range(len(tokens))] if is_gemma else scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    has_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens(_matched_pieces(file, vocabulary))
    return tokenizer, True


def _matched_pieces(file: GgufFile, vocabulary: _Vocabulary) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is cut into pieces."""
    is_phi3 = file.text("general.architecture") == "phi3"
    return [
        AddedToken(
            token,
            special=token_type == TokenType.CONTROL,
            normalized=False,
            rstrip=is_phi3 and token_type == TokenType.CONTROL and token not in _PHI3_KEEPS,
        )
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token_type in _MATCHED_IN_TEXT and token.strip(" ")
    ]


def _merges(pieces: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best first, as they are tried."""
    ids = pieces.ids
    found = []
    for index, (token, token_type) in enumerate(zip(pieces.tokens, pieces.types, strict=True)):
        if token_type not in _MERGED or len(token) > _LONGEST_PIECE:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right))
    found.sort()
    return [(pieces.tokens[left], pieces.tokens[right]) for _, left, right in found]


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
    index = file.integer(f"tokenizer.ggml.{name}_token_id", None)
    if index is None:
        return None
    if index >= len(tokens):
        raise ConfigError(f"GGUF {name} token is {index} but the vocabulary has {len(tokens):,}")
    return tokens[int(index)]
