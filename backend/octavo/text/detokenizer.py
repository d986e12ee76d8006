"""Token ids to text while they arrive, in pieces that add up to the whole decode exactly.

Knows nothing of stop strings or of who reads the text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.text.tokenizer import Tokenizer, replace_nul

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_FEW_TOKENS = 64


class IncrementalDetokenizer:
    """The text of one sequence, as deltas; special tokens and unknown ids give no text.

    The joined deltas are what `Tokenizer.decode` makes of the same ids after the same prompt. A
    character whose bytes have not all arrived is held back; bytes that are no character come out as
    U+FFFD, as many as the whole decode has. Bytes at the end of the prompt never join those of the
    first token: the prompt only tells whether text stands before. Cost: amortised constant a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream: _Stream = (
            _ByteLevelStream()
            if tokenizer.byte_level
            else _PieceStream(tokenizer, prompt_token_ids)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        return replace_nul("".join(self._push_one(token_id) for token_id in token_ids))

    def finish(self) -> str:
        """Return the text still held back; nothing may be pushed afterwards."""
        return replace_nul(self._stream.finish())

    def _push_one(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        return "" if piece is None else self._stream.push(token_id, piece)


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

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, piece: str) -> str:
        try:
            data = bytes([_BYTE_OF[char] for char in piece])
        except KeyError:
            data = piece.encode()  # an added token is spelt as plain text
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """Tokens that are text: each is decoded once, behind the little that may change how it reads.

    A piece reads differently when it is the first (a leading space is dropped), after a word's end
    mark (which turns to a space), and in a row of byte tokens (one bad byte turns the whole row to
    U+FFFD). So `_behind` stands before every piece: the pieces so far while they have no text, and
    then a plain token and the last piece. `_held` is a row of byte tokens that has not ended.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []
        # The first tokens nearly always have text, so a long prompt is not decoded for it.
        head = prompt_token_ids[:_FEW_TOKENS]
        if tokenizer.decode(head) or tokenizer.decode(prompt_token_ids):
            self._behind = self._context(self._last_piece(prompt_token_ids))
        else:
            self._behind = [i for i in prompt_token_ids if tokenizer.piece(i) is not None]

    def push(self, token_id: int, piece: str) -> str:
        self._held.append(token_id)
        return "" if self._is_byte(piece) else self.finish()

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._behind)
        whole = self._tokenizer.decode(self._behind + self._held)
        self._behind = self._context(self._held[-1:]) if whole else self._behind + self._held
        self._held = []
        return whole[len(before) :]

    def _context(self, last: list[int]) -> list[int]:
        plain = self._tokenizer.plain_token_id
        return last if plain is None else [plain, *last]

    def _last_piece(self, token_ids: Sequence[int]) -> list[int]:
        for token_id in reversed(token_ids):
            piece = self._tokenizer.piece(token_id)
            if piece is not None:
                return [] if self._is_byte(piece) else [token_id]
        return []

    def _is_byte(self, piece: str) -> bool:
        return self._tokenizer.byte_fallback and _BYTE_PIECE.fullmatch(piece) is not None
