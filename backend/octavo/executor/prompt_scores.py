"""How likely the tokens of prompts are, from the states of a step's rows.

The vocabulary is many times as wide as a state, so rows are projected a few at a time, and only
what is asked for of each is kept. Knows nothing of models, nor of what becomes of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from octavo.request import TokenLogprobs
from octavo.sampling.device import HostCopy, to_device
from octavo.sampling.logprobs import find_logprobs, read_logprobs
from octavo.scheduler.output import ScoredPrompt

#: Rows of logits that there are at a time, beside those that are drawn from.
PIECE_ROWS = 32


class PromptScores:
    """Log-probabilities of the tokens of prompts; their copy to the host is under way.

    Args:
        scored: of one step; not empty.
        project: returns logits [rows, vocab] float32 of rows [rows] int64 of the step; the bits of
            a row must not depend on the others.
        device: where it does.
    """

    def __init__(
        self,
        scored: tuple[ScoredPrompt, ...],
        project: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        *arrays, self._counts = _rows_of(scored)
        rows, token_ids = to_device(arrays, device)
        every = torch.arange(PIECE_ROWS, device=device)
        pieces = []
        for piece in pieces_of(len(rows)):
            logits, targets = project(rows[piece]), token_ids[piece]
            pieces.append(find_logprobs(logits, every[: len(targets)], targets, self._counts))
        self._copy = HostCopy([torch.cat(columns) for columns in zip(*pieces, strict=True)])

    def wait(self) -> list[TokenLogprobs]:
        """Wait for the copy, and return those of each token of `scored`, in order."""
        return read_logprobs(self._counts, self._copy.wait())


def pieces_of(num_rows: int) -> Iterator[slice]:
    """Yield the rows that are projected at a time, in order."""
    for start in range(0, num_rows, PIECE_ROWS):
        yield slice(start, min(start + PIECE_ROWS, num_rows))


def _rows_of(
    scored: tuple[ScoredPrompt, ...],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]:
    """Return the row that says how likely each token is, the token, and how many to tell beside."""
    sizes = [len(prompt.token_ids) for prompt in scored]
    rows = chain.from_iterable(
        range(prompt.first_row, prompt.first_row + size)
        for prompt, size in zip(scored, sizes, strict=True)
    )
    token_ids = chain.from_iterable(prompt.token_ids for prompt in scored)
    counts = [prompt.sequence.params.prompt_logprobs or 0 for prompt in scored]
    return (
        np.fromiter(rows, np.int64),
        np.fromiter(token_ids, np.int64),
        [count for count, size in zip(counts, sizes, strict=True) for _ in range(size)],
    )
