"""Whether and when something that ended by itself is started again.

Bounded: each pause is twice the one before, and after a number of starts there is no other. Knows
nothing of what is started, nor of the clock.
"""

from __future__ import annotations


class RestartPolicy:
    """Counts the starts after an end.

    Args:
        max_restarts: starts in a row at most; 0 for none.
        first_delay_s: pause before the first of them; each further one doubles it.
        sound_after_s: what was ready this long counts as sound: its end begins a new count.
    """

    def __init__(
        self, max_restarts: int = 5, first_delay_s: float = 0.5, sound_after_s: float = 60.0
    ) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        """Starts since the count began."""
        self._first_delay_s = first_delay_s
        self._sound_after_s = sound_after_s

    def next_delay_s(self, ready_for_s: float) -> float | None:
        """Return the pause before the next start, which counts, or None if there is no other.

        `ready_for_s` is how long what ended now had been ready; 0.0 if it never was.
        """
        if ready_for_s > self._sound_after_s:
            self.num_restarts = 0
        if self.num_restarts == self.max_restarts:
            return None
        self.num_restarts += 1
        return float(self._first_delay_s * 2 ** (self.num_restarts - 1))
