"""Gathers the block copies of the step that is being planned, safe in the executor's order.

Knows block ids only: nothing of pools, sequences or tensors.
"""

from __future__ import annotations

from octavo.cache.block_copies import BlockCopies, BlockPair, SwapIn

_NONE = BlockCopies()


class PendingCopies:
    """Copies asked for since the last `pop`, which returns them as data.

    Asked for in any order, they are made swap-outs first. A block that was itself only filled by a
    copy of this step is therefore swapped out from where its content lies when the step begins.
    """

    def __init__(self) -> None:
        self._swap_out: dict[int, int] = {}
        self._copies: list[BlockPair] = []
        self._origins: dict[int, int] = {}
        self._swap_in: list[SwapIn] = []
        self._num_transfers = 0

    def swap_out(self, device: int, host: int) -> None:
        """Copy a device block to a host block; the last copy to a host block counts."""
        self._swap_out[host] = self._origins.get(device, device)

    def copy(self, source: int, target: int) -> None:
        """Copy a device block to another."""
        self._copies.append((source, target))
        self._origins[target] = self._origins.get(source, source)

    def swap_in(self, pairs: list[BlockPair]) -> int:
        """Copy (host block, device block) pairs in one transfer; return its id."""
        self._num_transfers += 1
        self._swap_in.append(SwapIn(self._num_transfers, tuple(pairs)))
        return self._num_transfers

    def pop(self) -> BlockCopies:
        """Return the copies of this step and begin the next."""
        if not (self._swap_out or self._copies or self._swap_in):
            return _NONE
        swap_out = tuple((device, host) for host, device in self._swap_out.items())
        copies = BlockCopies(swap_out, tuple(self._copies), tuple(self._swap_in))
        self._swap_out, self._copies, self._swap_in = {}, [], []
        self._origins.clear()
        return copies
