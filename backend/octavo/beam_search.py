"""Beam search of one request: which continuations live on, which are answers, and when it is over.

Beams stand in slots; which tokens are the most likely after each is told from outside. Finds what
transformers' `generate(num_beams=…, do_sample=False, early_stopping=False)` does. Knows nothing of
sequences, blocks or the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from octavo.request import FinishReason, TokenLogprob, TokenLogprobs


class Continuation(NamedTuple):
    """A beam of the next position: the one in slot `parent`, and one token more."""

    slot: int
    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What a search is to find; lengths are in tokens, without the prompt."""

    width: int
    """Beams at each position."""
    length_penalty: float
    """The sum of log-probabilities is divided by the length to this power: above 0 favours long
    answers."""
    ending_token_ids: frozenset[int]
    min_tokens: int
    """Answers do not end before they are longer than this."""
    max_tokens: int
    num_logprobs: int = 0
    """Most likely tokens that an answer tells at each place, beside its own."""

    @property
    def num_candidates(self) -> int:
        """Candidates for a beam: as many as live on, when all that end come first."""
        return self.width + len(self.ending_token_ids)


class _Path(NamedTuple):
    """The last token of a beam, the most likely ones at its place, and what stands before it."""

    before: _Path | None
    token: TokenLogprob
    likeliest: TokenLogprobs


class _Beam(NamedTuple):
    slot: int
    score: float
    """Sum of its tokens' log-probabilities."""
    path: _Path | None

    @property
    def last(self) -> TokenLogprob:
        assert self.path is not None, "a beam has no token yet"
        return self.path.token


class _Answer(NamedTuple):
    score: float
    path: _Path | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A whole answer."""

    score: float
    logprobs: tuple[TokenLogprobs, ...]
    """What each token is, and how likely it and others were at its place."""
    finish_reason: FinishReason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens, the ending one included."""
        return tuple(token.token_id for token, *_ in self.logprobs)


class BeamSearch:
    """The beams at one position, and the best answers until now.

    Every beam gets candidates by `offer`; then `advance` goes on by one token. At first all beams
    are alike, and only the one in slot 0 counts.
    """

    def __init__(self, rules: BeamRules) -> None:
        self.rules = rules
        self._num_tokens = 0
        self._beams = [_Beam(0, 0.0, None)]
        """Best first."""
        self._missing = set(range(rules.width))
        """Slots of beams without candidates for the next position."""
        self._candidates: dict[int, TokenLogprobs] = {}
        self._answers: list[_Answer] = []
        """Best first, at most one for each beam."""

    def offer(self, slot: int, candidates: TokenLogprobs) -> bool:
        """Take the most likely tokens after one beam; return whether all beams have theirs.

        There must be at least `rules.num_candidates`, or the whole vocabulary, in any order.
        """
        self._missing.remove(slot)
        self._candidates[slot] = tuple(sorted(candidates, key=_by_rank))
        return not self._missing

    def advance(self) -> list[Continuation]:
        """Return the beams of the next position, the best first, or none when the search is over.

        All must have candidates. A beam that lives on keeps its slot; what it branches into gets
        slots of beams that do not.
        """
        rules = self.rules
        self._num_tokens += 1
        is_last = self._num_tokens == rules.max_tokens
        going_on: list[_Beam] = []
        for place, beam in enumerate(merge(*map(self._extended, self._beams), key=_falling)):
            ends = beam.last.token_id in rules.ending_token_ids
            if place < rules.width and (ends or is_last):
                self._keep(beam, FinishReason.STOP if ends else FinishReason.LENGTH)
            if not ends:
                going_on.append(beam)
            if len(going_on) == rules.width:
                break
        self._candidates = {}
        if is_last or not going_on or not self._can_improve(going_on[0].score):
            return []
        return self._seat(going_on)

    def best(self, count: int) -> list[Hypothesis]:
        """Return the best answers of a search that is over."""
        return [
            Hypothesis(score, tuple(_backwards(path))[::-1], reason)
            for score, path, reason in self._answers[:count]
        ]

    def _extended(self, beam: _Beam) -> Iterator[_Beam]:
        """Yield a beam by each of its candidates, the best first, still in its own slot."""
        rules, candidates = self.rules, self._candidates[beam.slot]
        may_end = self._num_tokens > rules.min_tokens
        likeliest = candidates[: rules.num_logprobs]
        for token in candidates:
            if may_end or token.token_id not in rules.ending_token_ids:
                path = _Path(beam.path, token, likeliest)
                yield _Beam(beam.slot, beam.score + token.logprob, path)

    def _keep(self, beam: _Beam, reason: FinishReason) -> None:
        """Make an answer of a beam, if it is among the best."""
        answer = _Answer(self._normalised(beam.score), beam.path, reason)
        self._answers = sorted([*self._answers, answer], key=_falling)[: self.rules.width]

    def _can_improve(self, best_score: float) -> bool:
        """Return whether the best beam would displace an answer, if it ended as it is.

        A heuristic: with a positive penalty it might do so later, when it is longer.
        """
        is_full = len(self._answers) == self.rules.width
        return not is_full or self._normalised(best_score) > self._answers[-1].score

    def _normalised(self, score: float) -> float:
        return score / math.pow(self._num_tokens, self.rules.length_penalty)

    def _seat(self, beams: list[_Beam]) -> list[Continuation]:
        """Give each beam a slot of its own: the best of those with one parent get its slot."""
        parents = {beam.slot for beam in beams}
        free = iter(sorted(set(range(self.rules.width)) - parents))
        self._beams, continuations = [], []
        for beam in beams:
            slot = beam.slot if beam.slot in parents else next(free)
            parents.discard(beam.slot)
            self._beams.append(beam._replace(slot=slot))
            continuations.append(Continuation(slot, beam.slot, beam.last.token_id))
        self._missing = {beam.slot for beam in self._beams}
        return continuations


def _falling(scored: _Beam | _Answer) -> float:
    return -scored.score


def _by_rank(token: TokenLogprob) -> tuple[int, int]:
    return token.rank, token.token_id


def _backwards(path: _Path | None) -> Iterator[TokenLogprobs]:
    while path is not None:
        token = path.token
        yield (token, *[other for other in path.likeliest if other.token_id != token.token_id])
        path = path.before
