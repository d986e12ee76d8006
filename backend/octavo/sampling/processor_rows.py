"""What requests say of single tokens, for the rows of one step, as plain arrays.

Costs only what is asked for. Knows nothing of logits; in which order it is done:
octavo.sampling.processors.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.sampling.token_rules import SeenTokens
from octavo.sequence import Sequence


class BiasedTokens(NamedTuple):
    """What is added to logits; every array is [tokens], and no token is named twice."""

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class PenalizedRows(NamedTuple):
    """The fields of `octavo_kernels.Penalties`."""

    rows: npt.NDArray[np.int64]
    row_starts: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.int32]
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]


class BannedPairs(NamedTuple):
    """Tokens that must not be drawn; every array is [tokens]."""

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]


class MaskedRows(NamedTuple):
    """Rows that draw only tokens whose bit is 1; a row may stand here more than once."""

    rows: npt.NDArray[np.int64]
    """[n]"""
    bitmask: npt.NDArray[np.int32]
    """[n, words], as `octavo_kernels.apply_token_bitmask` takes it."""


@dataclass(frozen=True, slots=True)
class ProcessorRows:
    """One step's, each None where no row asks for it."""

    biases: BiasedTokens | None = None
    penalties: PenalizedRows | None = None
    banned: BannedPairs | None = None
    masks: MaskedRows | None = None
    grammar: MaskedRows | None = None


def build_processor_rows(
    sequences: Rows[Sequence],
    ending_token_ids: Callable[[Sequence], frozenset[int]],
    grammar: MaskedRows | None = None,
) -> ProcessorRows | None:
    """Collect what `sequences` say of tokens, one row each, in order; None if that is nothing.

    Mutates what those with penalties have seen: it takes in their new tokens, which must be named.
    """
    held_open = [
        (row, s) for row, s in enumerate(sequences) if s.num_output_tokens < s.params.min_tokens
    ]
    ruled = [(row, s, s.rules) for row, s in enumerate(sequences) if s.rules is not None]
    if not held_open and not ruled and grammar is None:
        return None
    banned = [(row, sorted(ending_token_ids(s))) for row, s in held_open]
    if grammar is not None:
        banned = _without_only_ways(banned, grammar)
    banned += [(row, r.banned.after(s.token_ids)) for row, s, r in ruled if r.banned is not None]
    return ProcessorRows(
        _biased([(row, *r.biases) for row, _, r in ruled if r.biases is not None]),
        _penalized([(row, s, r.seen) for row, s, r in ruled if r.seen is not None]),
        _banned([(row, ids) for row, ids in banned if ids]),
        _masked([(row, r.allowed) for row, _, r in ruled if r.allowed is not None]),
        grammar,
    )


def _without_only_ways(
    banned: list[tuple[int, list[int]]], grammar: MaskedRows
) -> list[tuple[int, list[int]]]:
    """Leave out the rows whose grammar allows nothing but what is banned: these must end."""
    masks = dict(zip(grammar.rows.tolist(), grammar.bitmask, strict=True))
    return [(row, ids) for row, ids in banned if row not in masks or _allows_more(masks[row], ids)]


def _allows_more(mask: npt.NDArray[np.int32], token_ids: list[int]) -> bool:
    rest = mask.copy()
    for token_id in token_ids:
        if token_id < 32 * len(rest):
            rest.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return bool(rest.any())


def _biased(
    asked: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]],
) -> BiasedTokens | None:
    if not asked:
        return None
    rows, ids, values = zip(*asked, strict=True)
    return BiasedTokens(
        np.repeat(rows, list(map(len, ids))), np.concatenate(ids), np.concatenate(values)
    )


def _penalized(asked: list[tuple[int, Sequence, SeenTokens]]) -> PenalizedRows | None:
    if not asked:
        return None
    for _, sequence, each in asked:
        each.read(sequence.token_ids)
    params = [sequence.params for _, sequence, _ in asked]
    ids = [each.ids for _, _, each in asked]
    return PenalizedRows(
        rows=np.array([row for row, _, _ in asked], np.int64),
        row_starts=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        token_ids=np.concatenate(ids),
        output_counts=np.concatenate([each.counts for _, _, each in asked]),
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
    )


def _banned(asked: list[tuple[int, list[int]]]) -> BannedPairs | None:
    if not asked:
        return None
    rows, ids = zip(*asked, strict=True)
    return BannedPairs(
        np.repeat(rows, list(map(len, ids))), np.array([*chain.from_iterable(ids)], np.int64)
    )


def _masked(asked: list[tuple[int, npt.NDArray[np.int32]]]) -> MaskedRows | None:
    if not asked:
        return None
    rows, masks = zip(*asked, strict=True)
    bitmask = np.zeros((len(masks), max(map(len, masks))), np.int32)
    for words, mask in zip(bitmask, masks, strict=True):
        words[: len(mask)] = mask
    return MaskedRows(np.array(rows, np.int64), bitmask)
