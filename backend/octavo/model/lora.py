"""What adapters add to the products of a model, each to its own rows of a step.

    product[row] += x[row] @ down.T @ up.T          of the row's adapter

In float32, whatever the model's dtype, as PEFT computes it: a row of the product is widened, added
to and rounded once. A row's bits depend on its own adapter alone; a row without one is not touched.
Knows nothing of files or of where in a model a linear layer stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo_kernels import LowRankTable, low_rank_add_


class LowRank:
    """What adapters add to one linear layer, each from a slot of its own.

    Native code has a table of them, each of its own rank and in memory of its own. Elsewhere slots
    are groups of one rank.

    Args:
        linear: the layer.
        num_slots: adapters that may be in a step.
        rank: the largest of theirs; of joined layers the sum of their ranks.
        device: the layer's.
    """

    def __init__(
        self, linear: PackedLinear, num_slots: int, rank: int, device: torch.device
    ) -> None:
        self._rank = rank
        self.table = None if linear.native is None else LowRankTable(linear.native, num_slots)
        """For native code, or None where that does not serve."""
        self._groups = None
        if self.table is None:
            shapes = (num_slots, rank, linear.in_features), (num_slots, linear.out_features, rank)
            down, up = (GroupedLinear(shape, torch.float32, device) for shape in shapes)
            self._groups = down, up

    def fill(self, slot: int, down: torch.Tensor, up: torch.Tensor) -> None:
        """Give a slot its adapter, in the place of what it had; no step may use it meanwhile.

        Args:
            slot: which.
            down: [own rank, in] float32, contiguous; not kept. The rank may be 0, for nothing.
            up: [out, own rank] float32, contiguous, with the adapter's factor; not kept.
        """
        if self.table is not None:
            self.table.put(slot, self.table.pack(down, up) if len(down) else None)
            return
        assert self._groups is not None
        groups, missing = self._groups, self._rank - len(down)
        groups[0].fill(slot, F.pad(down, (0, 0, 0, missing)))
        groups[1].fill(slot, F.pad(up, (0, missing)))

    def add_(self, product: torch.Tensor, x: torch.Tensor, adapted: AdaptedRows) -> None:
        """Add to the layer's product what adapters add to it.

        Args:
            product: [num_tokens, out], mutated at adapted rows.
            x: [num_tokens, in], what the layer has multiplied.
            adapted: their rows, by slot.
        """
        rows, starts = adapted.rows, adapted.starts
        if self.table is not None:
            low_rank_add_(product, x, self.table, rows, starts)
            return
        assert self._groups is not None
        down, up = self._groups
        added = up(down(x.index_select(0, rows).float(), starts), starts)
        added += product.index_select(0, rows)
        product.index_copy_(0, rows, added.to(product.dtype))


LowRanks = Mapping[PackedLinear, LowRank]
"""By linear layer, as far as some adapter changes it."""
NO_LOW_RANKS: LowRanks = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a model, and the rows of one step that they change."""

    low_ranks: LowRanks
    adapted: AdaptedRows

    def add_(self, product: torch.Tensor, linear: PackedLinear, x: torch.Tensor) -> None:
        """Add to a layer's product what adapters add to it, if anything; see `LowRank.add_`."""
        low_rank = self.low_ranks.get(linear)
        if low_rank is not None:
            low_rank.add_(product, x, self.adapted)
