"""What a request says of single tokens, and what one of its answers has seen of them.

Read from the request once; what an answer has seen grows by its new tokens and is never counted
anew. Knows nothing of logits, batches or text.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from octavo.request import Request


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Of one answer; None is what its request does not ask for."""

    biases: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None
    """Token ids, each once, and what is added to their logits."""
    allowed: npt.NDArray[np.int32] | None
    """Bit i % 32 of word i // 32 is 1 if token i may be drawn; those beyond may not."""
    banned: BannedTokens | None
    seen: SeenTokens | None
    """What penalties depend on; this answer's own."""

    @property
    def reads_tokens(self) -> bool:
        """Whether the next token depends on those before."""
        return self.seen is not None or (self.banned is not None and self.banned.reads_tokens)

    def fork(self) -> TokenRules:
        """Return the rules of another answer that has seen the same so far."""
        return replace(self, seen=None if self.seen is None else self.seen.copy())


def make_token_rules(request: Request) -> TokenRules | None:
    """Return the rules of a request's first answer, or None if it asks for none."""
    params, banned = request.params, request.bad_words_token_ids
    if not (params.penalizes or params.logit_bias or params.allowed_token_ids or banned):
        return None
    return TokenRules(
        biases=_split(params.logit_bias) if params.logit_bias else None,
        allowed=_bitmask(params.allowed_token_ids) if params.allowed_token_ids else None,
        banned=BannedTokens(banned) if banned else None,
        seen=_seen_tokens(request) if params.penalizes else None,
    )


class BannedTokens:
    """Sequences of token ids that must not be completed."""

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        self._always = [ids[0] for ids in sequences if len(ids) == 1]
        self._after: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """By the token before the last: all before the last, and the last."""
        for *prefix, last in sequences:
            if prefix:
                self._after[prefix[-1]].append((prefix, last))

    @property
    def reads_tokens(self) -> bool:
        """Whether what is banned depends on the tokens before."""
        return bool(self._after)

    def after(self, token_ids: list[int]) -> list[int]:
        """Return the ids that may not follow `token_ids`."""
        candidates = self._after.get(token_ids[-1])
        if candidates is None:
            return self._always
        return self._always + [
            last for prefix, last in candidates if token_ids[-len(prefix) :] == prefix
        ]


class SeenTokens:
    """The different tokens of a prompt and one answer, and how often the answer holds each.

    ids      │ the prompt's, rising │ others, as they came │ room │
    counts   │ 0, 1, …              │ 1, …                 │      │
    """

    def __init__(self, prompt_ids: npt.NDArray[np.int64], num_prompt_tokens: int) -> None:
        """Begin with `prompt_ids`, which rise, and an answer behind so many tokens."""
        self._ids = prompt_ids
        self._counts = np.zeros(len(prompt_ids), np.int32)
        self._num_prompt_ids = self._num_ids = len(prompt_ids)
        self._num_read_tokens = num_prompt_tokens
        self._places: dict[int, int] = {}
        """Of the answer's tokens."""

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Token ids, each once."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """How often the answer holds each of `ids`."""
        return self._counts[: self._num_ids]

    def read(self, token_ids: list[int]) -> None:
        """Count what has come since the last call; `token_ids` are prompt and answer."""
        for token_id in token_ids[self._num_read_tokens :]:
            place = self._places.get(token_id)
            if place is None:
                place = self._places[token_id] = self._find_or_add(token_id)
            self._counts[place] += 1
        self._num_read_tokens = len(token_ids)

    def copy(self) -> SeenTokens:
        """Return one that has seen the same and goes on by itself."""
        copy = SeenTokens(self._ids, self._num_read_tokens)
        # Ids up to here change no more, and whoever adds one when there is no room makes new ones.
        copy._ids = self._ids[: self._num_ids]
        copy._counts = self.counts.copy()
        copy._num_ids, copy._num_prompt_ids = self._num_ids, self._num_prompt_ids
        copy._places = dict(self._places)
        return copy

    def _find_or_add(self, token_id: int) -> int:
        place = int(np.searchsorted(self._ids[: self._num_prompt_ids], token_id))
        if place < self._num_prompt_ids and self._ids[place] == token_id:
            return place
        if self._num_ids == len(self._ids):
            room = max(64, self._num_ids)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
        place = self._num_ids
        self._ids[place] = token_id
        self._num_ids += 1
        return place


def _seen_tokens(request: Request) -> SeenTokens:
    # Only the repetition penalty heeds the prompt.
    heeded = request.continued_token_ids if request.params.repetition_penalty != 1.0 else ()
    return SeenTokens(np.unique(np.array(heeded, np.int64)), len(request.prompt_token_ids))


def _split(
    biases: tuple[tuple[int, float], ...],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    ids, values = zip(*biases, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float32)


def _bitmask(token_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-(max(token_ids) + 1) // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.dtype("<i4"))
