"""Finds which tokens grammars allow, while the model runs.

Knows nothing of logits, nor of grammars but that they have masks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from octavo.grammar.matcher import GrammarMatcher, fill_masks
from octavo.host_resources import within_quota
from octavo.sampling.processor_rows import MaskedRows
from octavo.sequence import Sequence

#: A mask takes about 10 us, so that more threads pay for hundreds of rows only; on few cores they
#: would be taken from the model.
_MAX_THREADS = 4
_CORES_PER_THREAD = 4


class GrammarMasks:
    """Masks of one step at a time, on threads beside the one that runs the model."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._library_threads: LLExecutor | None = None

    def start(self, sequences: Rows[Sequence]) -> Future[MaskedRows] | None:
        """Begin with the rows whose sequences follow a grammar; None if none does.

        Until the result is there, nothing else may use their grammars.
        """
        asked = [(row, s.grammar) for row, s in enumerate(sequences) if s.grammar is not None]
        return self._thread.submit(self._fill, asked) if asked else None

    def _fill(self, asked: list[tuple[int, GrammarMatcher]]) -> MaskedRows:
        if self._library_threads is None:
            num_threads = within_quota(len(os.sched_getaffinity(0))) // _CORES_PER_THREAD
            self._library_threads = LLExecutor(min(max(1, num_threads), _MAX_THREADS))
        rows, matchers = zip(*asked, strict=True)
        return MaskedRows(np.array(rows, np.int64), fill_masks(matchers, self._library_threads))
