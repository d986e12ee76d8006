"""Token ids to text while they arrive, in pieces that add up to the whole decode exactly.

Knows nothing of stop strings or of who reads the text.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from octavo.text.tokenizer import REPLACEMENT, Tokenizer, replace_nul

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_FEW_TOKENS = 64
#: Bytes that may begin a character without finishing it.
_LONGEST_BEGINNING = 3

#: A token's id, and what the vocabulary spells it as.
_Token = tuple[int, str]


class IncrementalDetokenizer:
    """The text of one sequence, as deltas; ids without a token give none.

    The joined deltas are what `Tokenizer.decode` makes of the same ids after the same prompt. A
    character whose bytes have not all arrived is held back; bytes that are no character come out as
    U+FFFD, as many as the whole decode has. A character that the prompt's end begins and the first
    tokens finish comes out with these; the prompt's own bytes never come out as U+FFFD. Otherwise
    the prompt only tells whether text stands before. Cost: amortised constant a token.

    Args:
        tokenizer: whose ids these are.
        prompt_token_ids: what the ids follow.
        skip_special_tokens: give no text for special tokens.
        spaces_between_special_tokens: false leaves out what the tokenizer's decoder puts between
            two added tokens that follow each other, if special tokens are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        joins_added = not (skip_special_tokens or spaces_between_special_tokens)
        self._joined_ids = tokenizer.added_ids if joins_added else frozenset[int]()
        self._after_joined = False
        self._stream: _Stream = (
            _ByteLevelStream(self._tokens(reversed(prompt_token_ids)))
            if tokenizer.byte_level
            else _PieceStream(tokenizer, prompt_token_ids, self._tokens)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        return replace_nul("".join(map(self._push_one, self._tokens(token_ids))))

    def finish(self) -> str:
        """Return the text still held back; nothing may be pushed afterwards."""
        return replace_nul(self._stream.finish())

    def _push_one(self, token: _Token) -> str:
        token_id, piece = token
        text = self._stream.push(token_id, piece)
        after_joined, self._after_joined = self._after_joined, token_id in self._joined_ids
        return piece if after_joined and self._after_joined else text

    def _tokens(self, token_ids: Iterable[int]) -> Iterator[_Token]:
        """Yield those of the tokens that have text, or may have it."""
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id, self._skips_special)
            if piece is not None:
                yield token_id, piece


class _Stream(Protocol):
    def push(self, token_id: int, piece: str) -> str: ...

    def finish(self) -> str: ...


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


class _ByteLevelStream:
    """Tokens that are bytes: their text is the UTF-8 reading of all of them in a row."""

    def __init__(self, prompt_from_its_end: Iterator[_Token]) -> None:
        data = b""
        for _, piece in prompt_from_its_end:
            data = _bytes_of(piece) + data
            if len(data) >= _LONGEST_BEGINNING:
                break
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(data[-_LONGEST_BEGINNING:])
        self._holds_prompt = bool(self._decoder.getstate()[0])

    def push(self, token_id: int, piece: str) -> str:
        return self._without_prompt(self._decoder.decode(_bytes_of(piece)))

    def finish(self) -> str:
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        if not (self._holds_prompt and text):
            return text
        self._holds_prompt = False
        return text.removeprefix(REPLACEMENT)


def _bytes_of(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()  # an added token is spelt as plain text


class _PieceStream:
    """Tokens that are text: each is decoded once, behind the little that may change how it reads.

    A piece reads differently when it is the first (a leading space is dropped), after a word's end
    mark (which turns to a space), and in a row of byte tokens (one bad byte turns the whole row to
    U+FFFD). So `_behind` stands before every piece: the pieces so far while they have no text, and
    then a plain token and the last piece. `_held` is a row of byte tokens that has not ended; the
    first `_num_of_prompt` of them begin a character at the prompt's end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        tokens: Callable[[Iterable[int]], Iterator[_Token]],
    ) -> None:
        self._tokenizer = tokenizer
        from_its_end = itertools.islice(tokens(reversed(prompt_token_ids)), _LONGEST_BEGINNING)
        end = list(from_its_end)[::-1]
        self._held = self._beginning(end)
        self._num_of_prompt = len(self._held)
        self._behind = self._context(
            [token_id for token_id, piece in end[-1:] if not self._is_byte(piece)]
        )
        # The first tokens nearly always have text, so a long prompt is not decoded for it.
        if not any(
            self._decode([token_id for token_id, _ in tokens(ids)])
            for ids in (prompt_token_ids[:_FEW_TOKENS], prompt_token_ids)
        ):
            self._behind = [token_id for token_id, _ in tokens(prompt_token_ids)]

    def push(self, token_id: int, piece: str) -> str:
        self._held.append(token_id)
        return "" if self._is_byte(piece) else self.finish()

    def finish(self) -> str:
        if len(self._held) == self._num_of_prompt:
            return ""
        before = self._decode(self._behind + self._held[: self._num_of_prompt])
        whole = self._decode(self._behind + self._held)
        self._behind = self._context(self._held[-1:]) if whole else self._behind + self._held
        if not whole.startswith(before):
            # The character that the prompt's end began has been finished.
            before = before.removesuffix(REPLACEMENT * self._num_of_prompt)
        self._held, self._num_of_prompt = [], 0
        return whole[len(before) :]

    def _beginning(self, end: list[_Token]) -> list[int]:
        """Return those of the prompt's last tokens that begin a character and do not finish it."""
        row = [*itertools.takewhile(lambda token: self._is_byte(token[1]), reversed(end))][::-1]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(int(piece[3:5], 16) for _, piece in row))
        num_bytes = len(decoder.getstate()[0])
        return [token_id for token_id, _ in row[len(row) - num_bytes :]]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _context(self, last: list[int]) -> list[int]:
        plain = self._tokenizer.plain_token_id
        return last if plain is None else [plain, *last]

    def _is_byte(self, piece: str) -> bool:
        return self._tokenizer.byte_fallback and _BYTE_PIECE.fullmatch(piece) is not None
