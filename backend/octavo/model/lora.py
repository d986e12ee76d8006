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

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear


@dataclass(frozen=True, slots=True)
class LowRank:
    """What all adapters add to one linear layer: a group for each, in float32."""

    down: GroupedLinear
    """in -> rank: the largest of the adapters', or of joined layers the sum of their ranks."""
    up: GroupedLinear
    """The same -> out, with the adapter's factor."""


LowRanks = Mapping[PackedLinear, LowRank]
"""By linear layer, as far as some adapter changes it."""
NO_LOW_RANKS: LowRanks = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a model, and the rows of one step that they change."""

    low_ranks: LowRanks
    adapted: AdaptedRows

    def add_(self, product: torch.Tensor, linear: PackedLinear, x: torch.Tensor) -> None:
        """Add to a layer's product what adapters add to it.

        Args:
            product: [num_tokens, out], mutated at adapted rows.
            linear: the layer.
            x: [num_tokens, in], what it has multiplied.
        """
        low_rank = self.low_ranks.get(linear)
        if low_rank is None:
            return
        rows, starts = self.adapted.rows, self.adapted.starts
        own = x.index_select(0, rows).float()
        added = low_rank.up(low_rank.down(own, starts), starts)
        added += product.index_select(0, rows)
        product.index_copy_(0, rows, added.to(product.dtype))
