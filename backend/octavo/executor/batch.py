"""From a scheduling decision to the flat arrays a forward pass reads.

Buffers are allocated once; block tables are kept between steps and only appended to. Knows neither
the model nor the device's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo_kernels import AttentionMetadata


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step's tokens in one flat row, and where each sequence's lie.

    token_ids, positions: [num_tokens] int64. logits_rows: [num_samples] int64, the rows whose
    logits are sampled, in the order of the sequences that sample.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    attention: AttentionMetadata

    def to(self, device: torch.device) -> BatchInputs:
        """Return the inputs on `device`; on CPU that is this object."""
        if device.type == "cpu":
            return self
        move = partial(torch.Tensor.to, device=device)
        attention = self.attention
        return BatchInputs(
            move(self.token_ids),
            move(self.positions),
            move(self.logits_rows),
            replace(
                attention,
                query_start_loc=move(attention.query_start_loc),
                seq_lens=move(attention.seq_lens),
                block_tables=move(attention.block_tables),
                slot_mapping=move(attention.slot_mapping),
            ),
        )


class BatchBuilder:
    """Fill preallocated host buffers from a `SchedulerOutput`.

    The result of one `build` is overwritten by the next.

        query_start_loc   0        7   8        12
        token_ids         │ seq A  │ B │ seq C  │     A and C prefill chunks, B a decode
    """

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
    ) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(max_num_tokens, np.int64)
        self._positions = np.zeros(max_num_tokens, np.int64)
        self._slots = np.zeros(max_num_tokens, np.int64)
        self._starts = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        # The list each row was last filled from, and how much of it. A manager that frees a
        # sequence gives it a new list, so identity tells whether the row is still valid.
        self._sources: list[list[int] | None] = [None] * max_num_seqs
        self._filled = [0] * max_num_seqs

    def build(self, output: SchedulerOutput) -> BatchInputs:
        """Return the inputs of one step, on the host."""
        end = 0
        logits_rows = []
        for row, item in enumerate(output.scheduled):
            self._write_tokens(end, item)
            self._write_table(row, item.sequence.block_table)
            end += item.num_scheduled_tokens
            self._starts[row + 1] = end
            self._seq_lens[row] = item.sequence.num_computed_tokens + item.num_scheduled_tokens
            if item.samples:
                logits_rows.append(end - 1)
        num_seqs = len(output.scheduled)
        self._write_slots(num_seqs, end)
        return BatchInputs(
            token_ids=torch.from_numpy(self._token_ids[:end]),
            positions=torch.from_numpy(self._positions[:end]),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            attention=self._metadata(num_seqs, end),
        )

    def _write_tokens(self, begin: int, item: ScheduledSequence) -> None:
        first = item.sequence.num_computed_tokens
        if item.num_scheduled_tokens == 1:
            self._token_ids[begin] = item.sequence.token_ids[first]
            self._positions[begin] = first
            return
        last = first + item.num_scheduled_tokens
        end = begin + item.num_scheduled_tokens
        self._token_ids[begin:end] = item.sequence.token_ids[first:last]
        self._positions[begin:end] = np.arange(first, last)

    def _write_table(self, row: int, table: list[int]) -> None:
        if self._sources[row] is not table:
            self._sources[row] = table
            self._filled[row] = 0
        filled = self._filled[row]
        if filled < len(table):
            self._tables[row, filled : len(table)] = table[filled:]
            self._filled[row] = len(table)

    def _write_slots(self, num_seqs: int, num_tokens: int) -> None:
        rows = np.repeat(np.arange(num_seqs), np.diff(self._starts[: num_seqs + 1]))
        block, offset = np.divmod(self._positions[:num_tokens], self._block_size)
        self._slots[:num_tokens] = self._tables[rows, block].astype(np.int64) * self._block_size
        self._slots[:num_tokens] += offset

    def _metadata(self, num_seqs: int, num_tokens: int) -> AttentionMetadata:
        seq_lens = self._seq_lens[:num_seqs]
        max_seq_len = int(seq_lens.max())
        width = -(-max_seq_len // self._block_size)
        starts = self._starts[: num_seqs + 1]
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(np.ascontiguousarray(self._tables[:num_seqs, :width])),
            slot_mapping=torch.from_numpy(self._slots[:num_tokens]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=max_seq_len,
        )
