"""From a scheduling decision to the flat arrays a forward pass reads.

Buffers are allocated once, and each field of a step is written by one array operation. Knows
neither the model nor the device's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.executor.block_tables import BlockTableRows
from octavo.model.adapted_rows import AdaptedRows
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import PENDING_TOKEN, Sequence
from octavo_kernels import AttentionMetadata


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step's tokens in one flat row, and where each sequence's lie.

    token_ids, positions: [num_tokens] int64. logits_rows: [num_samples] int64, the rows whose
    logits are sampled, in the order of `SchedulerOutput.sampling`; a row that several sequences
    draw from is repeated. pending: [num_pending, 2] int64, tokens that the step before draws and
    whose ids the host does not know yet, as (index into token_ids, row that it is drawn from);
    token_ids is 0 there. adapted: rows that an adapter changes, or None if there are none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    pending: torch.Tensor
    attention: AttentionMetadata
    adapted: AdaptedRows | None = None


class BatchBuilder:
    """Fill preallocated host buffers from a `SchedulerOutput`.

    The result of one `build` is overwritten by the next.

        query_start_loc   0        7   8        12
        token_ids         │ seq A  │ B │ seq C  │     A and C prefill chunks, B a decode
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        num_adapter_slots: int = 0,
    ) -> None:
        self._block_size = block_size
        self._num_adapter_slots = num_adapter_slots
        self._token_ids = np.zeros(max_num_tokens, np.int64)
        self._positions = np.zeros(max_num_tokens, np.int64)
        self._slots = np.zeros(max_num_tokens, np.int64)
        self._starts = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._every_token = np.arange(max_num_tokens)
        self._tables = BlockTableRows(max_num_seqs, -(-max_model_len // block_size))

    def build(self, output: SchedulerOutput) -> BatchInputs:
        """Return the inputs of one step, on the host; at least one sequence must be scheduled."""
        sequences, each_count, draws = zip(*output.scheduled, strict=True)
        counts = np.array(each_count, np.int64)
        firsts = np.array([sequence.num_computed_tokens for sequence in sequences], np.int64)
        ends = np.cumsum(counts)
        end = int(ends[-1])
        self._starts[1 : len(ends) + 1] = ends

        positions = self._positions[:end]
        lags = np.repeat(firsts - (ends - counts), counts)
        np.add(self._every_token[:end], lags, out=positions)
        token_ids = self._token_ids[:end]
        token_ids[:] = _token_ids(output.scheduled)
        seq_lens = firsts + counts
        rows = self._tables.place(
            [sequence.block_table for sequence in sequences], -(-seq_lens // self._block_size)
        )
        self._write_slots(np.repeat(rows, counts), positions)
        return BatchInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            logits_rows=torch.from_numpy(np.repeat(ends - 1, list(map(len, draws)))),
            pending=torch.from_numpy(_take_pending(token_ids, ends, sequences)),
            attention=self._metadata(rows, counts, seq_lens),
            adapted=self._adapted_rows(sequences, counts),
        )

    def _write_slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        block, offset = np.divmod(positions, self._block_size)
        slots = self._slots[: len(positions)]
        blocks = self._tables.pick(rows, block)
        np.multiply(blocks, self._block_size, out=slots, dtype=np.int64)
        slots += offset

    def _metadata(
        self,
        rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
    ) -> AttentionMetadata:
        num_seqs, max_seq_len = len(rows), int(seq_lens.max())
        self._seq_lens[:num_seqs] = seq_lens
        starts = self._starts[: num_seqs + 1]
        tables = self._tables.gather(rows, -(-max_seq_len // self._block_size))
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(self._seq_lens[:num_seqs]),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(self._slots[: starts[-1]]),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )

    def _adapted_rows(
        self, sequences: tuple[Sequence, ...], counts: npt.NDArray[np.int64]
    ) -> AdaptedRows | None:
        slots = [sequence.lora_slot for sequence in sequences]
        if max(slots) < 0:
            return None
        slot_of_row = np.repeat(np.array(slots), counts)
        order = np.argsort(slot_of_row, kind="stable")
        starts = np.searchsorted(slot_of_row[order], np.arange(self._num_adapter_slots + 1))
        return AdaptedRows(
            torch.from_numpy(order[starts[0] :]), torch.from_numpy(starts - starts[0])
        )


def _take_pending(
    token_ids: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], sequences: tuple[Sequence, ...]
) -> npt.NDArray[np.int64]:
    """Put 0 in the place of pending tokens; return where they are and from which row they come."""
    indices = np.flatnonzero(token_ids == PENDING_TOKEN)
    token_ids[indices] = 0
    owners = np.searchsorted(ends, indices, side="right")
    rows = np.array([sequences[owner].pending_row for owner in owners], np.int64)
    return np.stack([indices, rows], axis=1)


def _token_ids(scheduled: tuple[ScheduledSequence, ...]) -> list[int]:
    """Return the token ids of a step, one sequence's behind the other's."""
    token_ids: list[int] = []
    for sequence, count, _ in scheduled:
        first = sequence.num_computed_tokens
        if count == 1:
            token_ids.append(sequence.token_ids[first])
        else:
            token_ids += sequence.token_ids[first : first + count]
    return token_ids
