"""Counts what arrives of one request and says how fast it came.

Knows nothing of connections or terminals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter

from octavo_client.answer import Delta, Timing


class Meter:
    """Tokens and times of one request, all its answers together, from the moment it is made.

    Args:
        clock: returns seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._num_tokens: Counter[int] = Counter()
        self._finish_reasons: list[str] = []
        self._num_input_tokens = 0
        self._timing: Timing | None = None

    def add(self, *deltas: Delta) -> None:
        """Count deltas that have just arrived, together."""
        self._last = self._clock()
        for delta in deltas:
            self._num_tokens[delta.index] += delta.num_output_tokens
            self._num_input_tokens = delta.num_input_tokens
            self._timing = delta.timing or self._timing
            if delta.finish_reason and delta.finish_reason not in self._finish_reasons:
                self._finish_reasons.append(delta.finish_reason)
        if self._first is None and self._num_tokens.total():
            self._first = self._last

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first of each answer, for a second of the server's decoding.

        None if there are no such tokens or the server sent no timing.
        """
        num_decoded = sum(max(count - 1, 0) for count in self._num_tokens.values())
        if self._timing is None or not num_decoded or not self._timing.decode_ms:
            return None
        return 1000.0 * num_decoded / self._timing.decode_ms

    def summary(self) -> str:
        """Return one line for a person."""
        cached = self._timing.cached_tokens if self._timing else 0
        read = f"{_tokens(self._num_input_tokens)} read"
        if cached:
            read += f", {cached:,} of them cached"
        parts = [read, self._speed(), ", ".join(self._finish_reasons)]
        return "; ".join(part for part in parts if part)

    def _speed(self) -> str:
        took = f"{self._last - self._started:.2f} s"
        first = "" if self._first is None else f"{self._first - self._started:.2f} s"
        rate = self.tokens_per_s
        parts = [
            f"{_tokens(self._num_tokens.total())} in {took}",
            # When all came at once, only the server knows when it had the first.
            f"first after {first}" if first and first != took else "",
            "" if rate is None else f"{rate:.1f} tokens/s",
        ]
        return ", ".join(part for part in parts if part)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"
