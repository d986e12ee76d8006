"""Which tokens an answer may go on with, after each of its tokens.

The library is llguidance. Beside xgrammar it has what a server of strangers' grammars needs: limits
on the work of a grammar and of each step, masks that are found when they are asked for rather than
ahead, copies of a matcher that share what they have learnt, and no other package behind it. Its
threads run beside Python's. Knows nothing of requests, or of how a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # sequences know this module, and so does the server's process, without a grammar
    from llguidance import LLExecutor, LLMatcher


class GrammarMatcher:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's own; nothing else may use it.
        vocab_size: tokens that its vocabulary has.
        name: the key that asked for it, for errors.
    """

    __slots__ = ("_matcher", "_name", "_vocab_size", "is_over")

    def __init__(self, matcher: LLMatcher, vocab_size: int, name: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._name = name
        self.is_over = False
        """Whether an end-of-text token has come, behind which no token is allowed."""

    @property
    def error(self) -> str | None:
        """Why no token is allowed any more, if the grammar was too much work on the way."""
        if not self._matcher.is_error():
            return None
        return f"{self._name} cannot be followed any further: {reason_of(self._matcher)}"

    def fork(self) -> GrammarMatcher:
        """Return a matcher that stands at the same place, and goes on by itself."""
        fork = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._name)
        fork.is_over = self.is_over
        return fork

    def advance(self, token_id: int) -> None:
        """Move on by a token that was allowed."""
        allows_end_only = self._matcher.is_stopped()
        self._matcher.consume_token(token_id)
        self.is_over = allows_end_only or self._matcher.stop_reason() == "EndOfSentence"


def reason_of(matcher: LLMatcher) -> str:
    """Return why a matcher allows no token any more, in one line that a client may see."""
    reason, _, backtrace = (
        matcher.get_error().replace("<non-verbose/>", "").partition("<backtrace>")
    )
    reason = " ".join(reason.split())
    if backtrace or reason.startswith("panic"):
        return "the library of grammars fails on it"
    return "no answer follows it" if reason.startswith("NoExtension") else reason[:500]


def fill_masks(matchers: Sequence[GrammarMatcher], executor: LLExecutor) -> npt.NDArray[np.int32]:
    """Return which tokens each of some matchers allows next; lets other Python threads run.

    Returns:
        [matchers, words] int32; bit i % 32 of word i // 32 is 1 if token i is allowed. Tokens
        beyond the words have no text. A matcher with an `error` allows none.
    """
    num_words = -(-max(each._vocab_size for each in matchers) // 32)
    masks = np.zeros((len(matchers), num_words), np.int32)
    executor.unsafe_compute_mask_ptr(
        [(each._matcher, row) for row, each in enumerate(matchers)],
        masks.ctypes.data,
        masks.strides[0],
        len(matchers),
    )
    masks[[each._matcher.is_error() for each in matchers]] = 0
    return masks
