"""Finds stop strings in text that arrives in pieces; knows nothing of tokens.

The stops form an Aho-Corasick automaton. The depth of its state is the length of the longest end of
the text that some stop begins with, which is exactly how much must be held back.
"""

from __future__ import annotations

import functools
from collections import deque


class StopStringFilter:
    """Passes text on up to the first stop string; costs amortised constant time a character.

    The first stop string is the one whose last character comes first, and the longest of those that
    end there. So the outcome does not depend on how the text was cut into pieces.

    Args:
        stops: none of them empty.
        include: pass the stop string itself on too, and hold nothing back for it.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._automaton = _automaton_of(stops) if stops else None
        self._include = include
        self._state = 0
        self._held = ""

    def push(self, text: str, *, ignore: bool = False) -> tuple[str, bool]:
        """Take more text; return what may be sent now, and whether a stop string was found.

        After a match the text returned ends before the stop string, or with it, and what follows is
        dropped: push nothing more. With `ignore` (before `min_tokens`) everything is returned, and
        a stop string that lies in it, even in part, is never found later.
        """
        if ignore or self._automaton is None:
            return self.finish() + text, False
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, char)
            if match_length := self._automaton.match_length[self._state]:
                return buffer[: end if self._include else end - match_length], True
        certain = len(buffer)
        if not self._include:
            certain -= self._automaton.depth[self._state]
        self._held = buffer[certain:]
        return buffer[:certain], False

    def finish(self) -> str:
        """Return the text held back, now that no more can complete a stop string in it."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """All stops at once: a state is the longest end of the text that some stop begins with."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]
        # Length of the longest stop that ends in each state; 0 where none does.
        self.match_length = [0]
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            self._insert(stop)
        # The state of the longest proper end of each state's text.
        self._fallback = [0] * len(self._next)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Return the state that one more character leads to."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = self._next[state][char]
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        """Fill in the fallbacks, states of shorter texts first, and pass matches along them."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                if not self.match_length[child]:
                    self.match_length[child] = self.match_length[self._fallback[child]]
                queue.append(child)


# The n answers to a request share one, and clients send the same stops again and again.
_automaton_of = functools.lru_cache(maxsize=16)(_Automaton)
