"""Text to token ids and back, for any tokenizer that transformers' Rust library runs.

Knows nothing of requests, streaming or chat.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from octavo.errors import ConfigError, InvalidRequest

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
        decoder = self._backend.decoder
        steps = set() if decoder is None else set(_step_types(json.loads(decoder.__getstate__())))
        self.byte_level = "ByteLevel" in steps
        """Whether each token is a string of bytes, one to a character."""
        self.byte_fallback = "ByteFallback" in steps
        """Whether some tokens are single bytes, spelt `<0xE4>`."""
        if self.byte_level and steps - {"ByteLevel", "Fuse", "Sequence"}:
            raise ConfigError(f"tokenizer decoder of {', '.join(sorted(steps))} is not supported")
        self._special_ids = frozenset(
            index for index, token in hf.added_tokens_decoder.items() if token.special
        )

    @classmethod
    def load(cls, name: str) -> Tokenizer:
        """Load the tokenizer of a checkpoint directory or hub id, with the ids that end a text.

        Raises:
            ConfigError: there is none, or it is not supported.
        """
        try:
            hf = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(f"no tokenizer can be loaded from {name!r}: {error}") from None
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
        ids: list[int] = self.hf(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids without a token give none, a NUL comes as U+FFFD.

        This is the tokenizer's own decoding without transformers' clean-up of spaces, which would
        change text that a stream has already sent.
        """
        known = [index for index in token_ids if 0 <= index < 2**32]
        return replace_nul(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None when it is special or does not exist."""
        if token_id in self._special_ids or not 0 <= token_id < 2**32:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    @functools.cached_property
    def plain_token_id(self) -> int | None:
        """An id whose text is letters: it stands for any text before a stream; None if none is."""
        for token_id in range(self.vocab_size):
            piece = self.piece(token_id)
            if piece is not None and piece.isalpha() and self.decode([token_id]) == piece:
                return token_id
        return None


def _step_types(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for step in decoder.get("decoders", ()):
        yield from _step_types(step)


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
