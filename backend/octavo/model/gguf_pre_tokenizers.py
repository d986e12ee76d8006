"""How text is cut before tokens are merged, by the names that GGUF files have for it.

Those of the families that are served; llama.cpp has about a hundred. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Return the pattern of words with at most one sign before them, and `digits`."""
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{signs}|{_REST}"


def _cased_words(ending: str, digits: str) -> str:
    """Return the same of words that also end where a capital follows, each with an `ending`."""
    before, signs = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    lower, upper = rf"{before}{_UPPER}*{_LOWER}+{ending}", rf"{before}{_UPPER}+{_LOWER}*{ending}"
    return rf"{lower}|{upper}|{digits}|{signs}|{_REST}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text."""

    pattern: str | None = None
    """What a piece is; None for that of GPT-2."""
    single_digits: bool = False
    """Digits are cut from all else first."""
    takes_whole_words: bool = False
    """A piece that is in the vocabulary is taken before any merge is tried."""
    begins_text: bool = False
    """Texts begin with the token of beginnings where a file does not say whether."""

    def build(self) -> Any:
        """Return it as `tokenizers` has it."""
        if self.pattern is None:
            gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
            return pre_tokenizers.Sequence([*digits, gpt2])
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_THREE_DIGITS = _words(r"\p{N}{1,3}")
_ONE_DIGIT = _words(r"\p{N}")
#: By `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "olmo": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "refact": PreTokenizer(single_digits=True),
    "llama-bpe": PreTokenizer(_THREE_DIGITS, takes_whole_words=True, begins_text=True),
    "smaug-bpe": PreTokenizer(_THREE_DIGITS),
    "dbrx": PreTokenizer(_THREE_DIGITS),
    "qwen2": PreTokenizer(_ONE_DIGIT),
    "stablelm2": PreTokenizer(_ONE_DIGIT),
    "tekken": PreTokenizer(_cased_words("", r"\p{N}"), takes_whole_words=True, begins_text=True),
    "gpt-4o": PreTokenizer(_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")),
}
