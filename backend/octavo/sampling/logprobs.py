"""How likely tokens are by the model's own distribution: of rows of logits, and on the host.

Knows nothing of how tokens are drawn, or of what is done to logits before that.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.request import TokenLogprob, TokenLogprobs
from octavo.sampling.device import to_device
from octavo.sequence import Sequence
from octavo_kernels import TopLogprobs, top_logprobs


class LogprobRows(NamedTuple):
    """Rows of which log-probabilities are asked for."""

    rows: npt.NDArray[np.int64]
    """[n], rising"""
    counts: tuple[int, ...]
    """How many of the most likely tokens each wants beside its own."""


def build_logprob_rows(sequences: Rows[Sequence]) -> LogprobRows | None:
    """Collect which of `sequences`, one row each, ask for log-probabilities; None if none does."""
    asked = [
        (row, sequence.num_logprobs)
        for row, sequence in enumerate(sequences)
        if sequence.num_logprobs is not None
    ]
    if not asked:
        return None
    rows, counts = zip(*asked, strict=True)
    return LogprobRows(np.array(rows, np.int64), counts)


class KeptLogits:
    """The rows of logits that are asked about, as the model gave them.

    Args:
        logits: [rows, vocab] float32.
        asked: some of these rows.
        copy: whether the logits will be changed before they are asked about.
    """

    def __init__(self, logits: torch.Tensor, asked: LogprobRows, *, copy: bool) -> None:
        (self._rows,) = to_device([asked.rows], logits.device)
        self._counts = asked.counts
        self._logits, self._places = logits, self._rows
        if copy:
            self._logits = logits[self._rows]
            self._places = torch.arange(len(self._rows), device=logits.device)

    def logprobs_of(self, token_ids: torch.Tensor) -> TopLogprobs:
        """Return what `read_logprobs` reads, of one token of every row, [rows] int64."""
        return find_logprobs(self._logits, self._places, token_ids[self._rows], self._counts)


def find_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, counts: Iterable[int]
) -> TopLogprobs:
    """Return what `read_logprobs` reads, on the device, without waiting for it.

    Args:
        logits: [rows, vocab] float32, as the model gave them.
        rows: [n] int64, rows of logits.
        token_ids: [n] int64, one of each of these rows.
        counts: [n], how many of the most likely tokens are wanted beside each.
    """
    return top_logprobs(logits, rows, token_ids, min(max(counts), logits.shape[1]))


def read_logprobs(counts: Iterable[int], columns: Iterable[list[Any]]) -> list[TokenLogprobs]:
    """Return `find_logprobs` of each row from its three tensors as lists."""
    return [_read_row(*row) for row in zip(counts, *columns, strict=True)]


def _read_row(
    count: int, token_ids: list[int], logprobs: list[float], ranks: list[int]
) -> TokenLogprobs:
    first, *others = map(
        TokenLogprob, token_ids[: 1 + count], logprobs[: 1 + count], ranks[: 1 + count]
    )
    return (first, *[each for each in others if each.token_id != first.token_id])
