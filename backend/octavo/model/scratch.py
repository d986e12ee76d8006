"""Memory for weights that are packed one after the other.

What is allocated for each and freed again would leave holes between the packed ones. Knows nothing
of what the weights are.
"""

from __future__ import annotations

import math

import torch


class Scratch:
    """One piece of memory, as large as the largest weight so far.

    Args:
        dtype: of the weights.
        device: where they are packed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory of a shape, to write to; it holds until it is taken again."""
        size = math.prod(shape)
        if len(self._memory) < size:
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)

    def leave(self) -> None:
        """Leave the memory to whoever has taken it last, and keep it no more."""
        self._memory = self._memory.new_empty(0)
