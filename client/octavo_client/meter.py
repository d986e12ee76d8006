"""Counts what arrives of one answer and says how fast it came; knows only numbers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


class Meter:
    """Tokens and times of one answer, from the moment it is made.

    Args:
        clock: returns seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._first = self._started
        self._last = self._started
        self._num_first_tokens = 0
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens that have just arrived."""
        self._last = self._clock()
        if not self._num_tokens:
            self._first = self._last
            self._num_first_tokens = num_tokens
        self._num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first delta; over the whole time when only one came."""
        if self._last > self._first:
            return (self._num_tokens - self._num_first_tokens) / (self._last - self._first)
        return self._num_tokens / max(self._last - self._started, 1e-9)

    def summary(self) -> str:
        """Return one line for a person."""
        return (
            f"{self._num_tokens} tokens in {self._last - self._started:.2f} s, "
            f"first after {self._first - self._started:.2f} s, {self.tokens_per_s:.1f} tokens/s"
        )
