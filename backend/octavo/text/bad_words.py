"""Words that must not be generated, as sequences of token ids.

As vLLM does, each is spelt as it begins a text and as it follows a space. Knows nothing of
requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.errors import InvalidRequest, shown
from octavo.text.tokenizer import Tokenizer


def bad_words_token_ids(
    words: Iterable[str], tokenizer: Tokenizer, eos_token_ids: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, without and with a space before it, each sequence once.

    What is an end of text by itself is left out, as transformers' NoBadWordsLogitsProcessor does,
    and so is a spelling for which the tokenizer lacks a token.

    Raises:
        InvalidRequest: a word has neither spelling.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        spellings = [tuple(_encode(spelling, tokenizer)) for spelling in (bare, f" {bare}")]
        if not any(spellings):
            raise InvalidRequest(f"bad_words has {shown(word)}, which this model cannot spell")
        found |= dict.fromkeys(filter(None, spellings))
    return tuple(ids for ids in found if len(ids) > 1 or ids[0] not in eos_token_ids)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        return []  # half a character is never generated
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [] if tokenizer.unknown_token_id in ids else ids
