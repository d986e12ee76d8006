"""What the sampler must know of each row, as plain arrays.

Built from the sequences that draw a token in this step; knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.sampling.logprobs import LogprobRows, build_logprob_rows
from octavo.sampling.processor_rows import MaskedRows, ProcessorRows, build_processor_rows
from octavo.sampling.random import fork_seeds
from octavo.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RandomRows:
    """How each row of a batch is drawn, of which some are random; every array is [rows]."""

    temperature: npt.NDArray[np.float32]
    """0 for greedy rows."""
    top_k: npt.NDArray[np.int32]
    """0 means all."""
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One step's sampling rows.

    `random` is None when every row is greedy, `logprobs` and `processors` when no row asks for any.
    """

    num_rows: int
    random: RandomRows | None
    logprobs: LogprobRows | None
    processors: ProcessorRows | None


def build_sampling_batch(
    sequences: Rows[Sequence],
    ending_token_ids: Callable[[Sequence], frozenset[int]],
    grammar: MaskedRows | None = None,
) -> SamplingBatch:
    """Collect the sampling parameters of `sequences`, one row each, in order.

    `grammar` has the masks of those that follow one.
    Mutates what sequences with penalties have seen: it takes in their new tokens.
    """
    return SamplingBatch(
        num_rows=len(sequences),
        random=None if all(s.params.greedy for s in sequences) else _random_rows(sequences),
        logprobs=build_logprob_rows(sequences),
        processors=build_processor_rows(sequences, ending_token_ids, grammar),
    )


def _random_rows(sequences: Rows[Sequence]) -> RandomRows:
    params = [sequence.params for sequence in sequences]
    # A greedy request may have no seed.
    seeds = [0 if p.seed is None else p.seed for p in params]
    return RandomRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seeds=fork_seeds(
            np.array(seeds, np.int64), np.array([s.index for s in sequences], np.int64)
        ),
        positions=np.array([sequence.num_tokens for sequence in sequences], np.int64),
    )
