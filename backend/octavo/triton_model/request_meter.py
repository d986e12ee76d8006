"""What is measured of one live request: when its tokens came, and how many.

Knows nothing of text, of the engine or of who reads the figures.
"""

from __future__ import annotations

from typing import NamedTuple


class NewTokens(NamedTuple):
    """What came of one answer at once; only tokens that count for the client are meant."""

    num_tokens: int
    interval_s: float | None = None
    """Since tokens of the same answer came before; None if these are its first."""
    first_after_s: float | None = None
    """From arrival until now; None unless these are the first of the whole request."""


class RequestMeter:
    """Times and counts of one request, of the answers together and apart."""

    def __init__(self, arrival_s: float, num_answers: int) -> None:
        self.first_token_s: float | None = None
        self.num_tokens = 0
        self._arrival_s = arrival_s
        self._last_s: list[float | None] = [None] * num_answers

    def take(self, index: int, num_tokens: int, now_s: float) -> NewTokens:
        """Note that an answer got more tokens, of which there may be none."""
        if not num_tokens:
            return NewTokens(0)
        last_s, self._last_s[index] = self._last_s[index], now_s
        self.num_tokens += num_tokens
        interval_s = None if last_s is None else now_s - last_s
        if self.first_token_s is not None:
            return NewTokens(num_tokens, interval_s)
        self.first_token_s = now_s
        return NewTokens(num_tokens, interval_s, now_s - self._arrival_s)
