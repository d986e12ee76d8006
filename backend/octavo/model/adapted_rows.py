"""Which rows of a step which adapter changes. Knows nothing of what adapters are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows of a step, sorted by adapter.

    row       0  1  2  3  4  5  6        adapter 0 changes 3, adapter 2 changes 1 and 5
    rows      3 │ 1  5
    starts    0, 1, 1, 3
    """

    rows: torch.Tensor
    """[num_rows] int64, each row at most once; at least one."""
    starts: torch.Tensor
    """[num_slots + 1] int64: those of an adapter are rows[starts[slot] : starts[slot + 1]]."""
