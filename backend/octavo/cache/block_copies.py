"""Copies of KV blocks that a step must make, as data.

Knows nothing of tensors or of how copies are made.
"""

from __future__ import annotations

from dataclasses import dataclass

BlockPair = tuple[int, int]
"""Source and target of a copy."""


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Host blocks on their way to the device.

    Its targets belong to nobody else until the executor reports `transfer_id` as arrived.
    """

    transfer_id: int
    pairs: tuple[BlockPair, ...]
    """(host block, device block)"""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """One step's copies.

    The executor makes them as if in this order, before the step's forward pass writes anything:
    `swap_out`, then `copies` one after the other, then `swap_in`. Only the last may still be under
    way when the step ends; a later step's copies come after it.
    """

    swap_out: tuple[BlockPair, ...] = ()
    """(device block, host block)"""
    copies: tuple[BlockPair, ...] = ()
    """(device block, device block)"""
    swap_in: tuple[SwapIn, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)
