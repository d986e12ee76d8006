"""Text to token ids and back, for any tokenizer that transformers' Rust library runs.

Knows nothing of requests, streaming or chat.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from octavo.errors import ConfigError, InvalidRequest, first_line

REPLACEMENT = "\ufffd"


def replace_nul(text: str) -> str:
    """Return `text` with NUL characters made U+FFFD.

    Clients and Triton's own tools end strings at a NUL, so none may leave the server. Replacing
    keeps lengths, shows that something was there, and gives the same text however it is cut.
    """
    return text.replace("\0", REPLACEMENT)


class Tokenizer:
    """A model's tokenizer; its methods may be called from several threads.

    Raises:
        ConfigError: the tokenizer is of a kind whose text cannot be streamed exactly.
    """

    def __init__(self, hf: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        if not hf.is_fast:
            raise ConfigError(
                f"tokenizer class {type(hf).__name__} is not supported; "
                "the checkpoint needs a tokenizer.json"
            )
        self.hf = hf
        """The transformers tokenizer."""
        self.eos_token_ids = eos_token_ids
        """Ids that end a text."""
        self._backend = hf.backend_tokenizer
        # Set once, for while one thread encodes no other may change them.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = hf.split_special_tokens
        decoder = self._backend.decoder
        steps = [] if decoder is None else [*_decoder_steps(json.loads(decoder.__getstate__()))]
        names = [step["type"] for step in steps]
        self.byte_level = "ByteLevel" in names
        """Whether each token is a string of bytes, one to a character."""
        self.byte_fallback = "ByteFallback" in names
        """Whether some tokens are single bytes, spelt `<0xE4>`."""
        if not _can_be_streamed(steps):
            raise ConfigError(
                f"the tokenizer's decoder of {', '.join(names)} is not supported: "
                "what a token reads as must not depend on those that come later"
            )
        added = hf.added_tokens_decoder
        self.added_ids = frozenset(added)
        """Ids of tokens beside the model's own vocabulary: all special ones, and maybe others."""
        self._texts: dict[int, str] = {}
        self._special_ids = frozenset(index for index, token in added.items() if token.special)

    @classmethod
    def load(cls, name: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer of a checkpoint directory or hub id, with the ids that end a text.

        Its own Python is run only if `trust_remote_code`.

        Raises:
            ConfigError: there is none, or it is not supported.
        """
        try:
            # Absent, transformers would ask on the terminal.
            hf = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:
            # The files may hold anything, and the Rust library raises what has no kind.
            if "trust_remote_code" in str(error):
                raise ConfigError(
                    f"the tokenizer of {name!r} needs code that it brings along; set option "
                    "trust_remote_code to true if you have read that code and trust it"
                ) from None
            raise ConfigError(
                f"no tokenizer can be loaded from {name!r}: {_why_none(name, error)}"
            ) from None
        return cls(hf, _as_ids(hf.eos_token_id) | _checkpoint_eos(name))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self.hf)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens spelt out in it are recognised.

        Args:
            text: the prompt, used as it is.
            add_special_tokens: add what the tokenizer itself adds, such as a first token; false
                for rendered chat messages, whose template has put it there.

        Raises:
            InvalidRequest: `text` is not Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt has a lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start:,}; allowed is what UTF-8 can hold"
            ) from None
        # Of one text at a time only the batch's method lets other threads run.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids without a token give none, a NUL comes as U+FFFD.

        This is the tokenizer's own decoding without transformers' clean-up of spaces, which would
        change text that a stream has already sent.
        """
        known = [index for index in token_ids if 0 <= index < 2**32]
        return replace_nul(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of a token by itself, a special one's too; for ids of the model's.

        A token that is part of a character gives U+FFFD.
        """
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> str | None:
        """Return a token as the vocabulary spells it; None when it is skipped or does not exist."""
        if not 0 <= token_id < 2**32 or (skip_special_tokens and token_id in self._special_ids):
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    @functools.cached_property
    def unknown_token_id(self) -> int | None:
        """The id of text for which there is no token; None if all text has tokens."""
        token = getattr(self._backend.model, "unk_token", None)
        return None if token is None else self._backend.token_to_id(token)

    @functools.cached_property
    def plain_token_id(self) -> int | None:
        """An id whose text is letters: it stands for any text before a stream; None if none is."""
        for token_id in range(self.vocab_size):
            piece = self.piece(token_id)
            if piece is not None and piece.isalpha() and self.decode([token_id]) == piece:
                return token_id
        return None

    @functools.cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token as the vocabulary spells it, which is never too short."""
        return max(map(len, self.hf.get_vocab()))


def _why_none(name: str, error: Exception) -> str:
    """Return in one line why there is no tokenizer; transformers lists ways to convert others."""
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "tokenizer.json")):
        return "there is no tokenizer.json in it"
    return f"{type(error).__name__}: {first_line(error)}"


def _decoder_steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _decoder_steps(step)


def _can_be_streamed(steps: list[dict[str, Any]]) -> bool:
    """Return whether the text of a token never changes with the tokens behind it.

    It may change what it gives at its end (a space after a word), or be a byte of a character.
    """
    names = [step["type"] for step in steps]
    if "ByteLevel" in names:
        return names[0] == "ByteLevel" and set(names[1:]) <= {"Fuse"}
    if "CTC" in names or any(step.get("stop") for step in steps):
        return False  # tokens that repeat the one before are dropped, or the end is stripped
    # Behind a fuse all text is one piece, in which a step may find what spans several tokens.
    fused = steps[names.index("Fuse") + 1 :] if "Fuse" in names else []
    return all(
        step["type"] in ("Fuse", "Strip")
        or (step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1)
        for step in fused
    )


def _checkpoint_eos(name: str) -> frozenset[int]:
    try:
        return _as_ids(GenerationConfig.from_pretrained(name).eos_token_id)
    except OSError:
        pass  # many checkpoints have no generation_config.json
    try:
        return _as_ids(PreTrainedConfig.get_config_dict(name)[0].get("eos_token_id"))
    except OSError:
        return frozenset()  # a tokenizer may stand alone, without a model beside it


def _as_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
