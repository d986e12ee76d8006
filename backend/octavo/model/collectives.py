"""What the ranks of a tensor group do together while they run the same layers.

Knows tensors, and nothing of processes or of how bytes travel.
"""

from __future__ import annotations

from typing import Protocol

import torch

from octavo_kernels import SharedExchange


class Collectives(Protocol):
    """The operations of one rank's tensor group.

    All ranks of the group call the same ones in the same order, with tensors of the same shape and
    dtype. Each may raise EngineError when another rank is gone.
    """

    rank: int
    """Place in the group."""
    size: int
    """Ranks in the group."""
    exchange: SharedExchange | None
    """The memory that `sum_` goes through, for native code that sums by itself; None if it goes
    another way."""

    def sum_(self, partial: torch.Tensor) -> None:
        """Replace each rank's tensor by the sum over all ranks, to the same bits everywhere.

        Terms are added in float32 in the order of the ranks, and rounded once: an element's bits do
        not depend on where it lies, so not on the number of rows.

        Args:
            partial: contiguous, mutated. It travels in its own dtype, rounded before it is added.
        """

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of ranks, on rank 0; nothing elsewhere.

        Args:
            part: contiguous.
        """


class Alone:
    """The group of one rank, which has nothing to do."""

    rank = 0
    size = 1
    exchange: SharedExchange | None = None

    def sum_(self, partial: torch.Tensor) -> None:
        """Leave the only term as it is."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the only part."""
        return [part]


ALONE = Alone()
