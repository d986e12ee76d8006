"""How many tokens a prompt or an answer has: a distribution, and how it is written in a word.

Knows nothing of requests.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

FORMS = "N, A-B, MEDIAN:SIGMA or A-B:MEDIAN"
_NUMBER = r"(\d+)"
_FIXED = re.compile(_NUMBER)
_UNIFORM = re.compile(f"{_NUMBER}-{_NUMBER}")
_LOGNORMAL = re.compile(rf"{_NUMBER}:(\d*\.?\d+)")
_CLIPPED = re.compile(f"{_NUMBER}-{_NUMBER}:{_NUMBER}")
#: The bounds of a clipped log-normal lie so many standard deviations of the logarithm apart.
_DEVIATIONS_BETWEEN_BOUNDS = 4.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers of tokens between two bounds, uniform or log-normal about a median."""

    text: str
    """One of the four `FORMS`, as it was given."""
    least: int
    """At least 1."""
    most: int | None
    """None where nothing bounds a log-normal from above."""
    median: int | None = None
    """None means uniform."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 for a uniform one."""

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read one of the four `FORMS`.

        Raises:
            ValueError: the text has none of the forms, or its numbers are no bounds.
        """
        if found := _FIXED.fullmatch(text):
            lengths = cls(text, int(found[1]), int(found[1]))
        elif found := _UNIFORM.fullmatch(text):
            lengths = cls(text, int(found[1]), int(found[2]))
        elif found := _LOGNORMAL.fullmatch(text):
            lengths = cls(text, 1, None, int(found[1]), float(found[2]))
        elif found := _CLIPPED.fullmatch(text):
            least, most, median = map(int, found.groups())
            spread = math.log(max(most, 1) / max(least, 1)) / _DEVIATIONS_BETWEEN_BOUNDS
            lengths = cls(text, least, most, median, spread)
        else:
            raise ValueError(f"{text!r} is no distribution of lengths: write {FORMS}")
        bounds = [1, lengths.least, lengths.median, lengths.most]
        given = [bound for bound in bounds if bound is not None]
        if given != sorted(given):
            raise ValueError(f"{text!r} is no distribution of lengths: 1 <= A <= MEDIAN <= B")
        return lengths

    def draw(self, random: Random) -> int:
        """Return the next length."""
        if self.median is None:
            return random.randint(self.least, self.most or self.least)
        drawn = max(self.least, round(random.lognormvariate(math.log(self.median), self.sigma)))
        return drawn if self.most is None else min(drawn, self.most)
