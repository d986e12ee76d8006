"""Finds out by trial what batches a model can have without changing its answers.

Not every architecture takes padding out of its state again, and some cannot have rows side by side
at all; a model's class does not say so, two short runs do. Knows nothing of requests.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

import torch

from octavo.static_engine.generation import Generation

#: Padding does most harm to a prompt that is short beside it.
_SHORT, _LONG = 2, 24
_STEPS = 2

#: How far logits may be apart, as a share of how they spread: rounding of other shapes, which
#: grows with what is rounded to. Padding that is not masked changes them by a tenth and more.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

logger = logging.getLogger(__name__)


class BatchKind(enum.Enum):
    """What prompts a batch of one model may hold."""

    PADDED = "prompts of any lengths"
    EQUAL = "prompts of one length, for padding changes its answers"
    SINGLE = "one prompt, for rows side by side change its answers"


def find_batch_kind(generation: Generation, vocab_size: int, dtype: torch.dtype) -> BatchKind:
    """Return the widest kind of batch in which rows have the logits that they have alone."""
    short, long, other = (
        _prompt(*each, vocab_size) for each in ((_SHORT, 3), (_LONG, 5), (_SHORT, 7))
    )
    alone = _logits(generation, [short])
    # What a model's generation config rules out or forces is at infinity.
    spread = float(alone[alone.isfinite()].std())
    tolerance = _TOLERANCES.get(dtype, max(_TOLERANCES.values())) * spread
    for kind, neighbour in ((BatchKind.PADDED, long), (BatchKind.EQUAL, other)):
        try:
            beside = _logits(generation, [short, neighbour])
        except Exception as error:  # a model's own code may raise anything
            logger.info("a batch of %s fails: %s", kind.value.partition(",")[0], error)
            continue
        apart = torch.where(beside == alone, 0.0, (beside - alone).abs())
        if apart.max() <= tolerance:
            return kind
    return BatchKind.SINGLE


def _prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    return [(seed * (position + 11)) % vocab_size for position in range(length)]


def _logits(generation: Generation, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the logits [steps, vocab] of the first prompt."""
    try:
        rows = [generation.begin(prompts, _STEPS)[0]]
        rows += [generation.step([1] * len(prompts))[0] for _ in range(1, _STEPS)]
        return torch.stack(rows)
    finally:
        generation.leave()
