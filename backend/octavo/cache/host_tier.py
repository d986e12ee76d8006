"""Host blocks as a second home of KV: of swapped sequences, and of blocks evicted on the device.

Knows blocks and keys; nothing of sequences or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Blocks

from octavo.cache.block_hash import BlockKey
from octavo.cache.block_pool import BlockPool
from octavo.cache.pending_copies import PendingCopies
from octavo.sequence import NO_BLOCK


class HostTier:
    """Fill the blocks of a host pool by copies from the device."""

    def __init__(self, pool: BlockPool, copies: PendingCopies) -> None:
        self._pool = pool
        self._copies = copies

    def store(self, blocks: Blocks[int], keys: Blocks[BlockKey]) -> list[int] | None:
        """Return host blocks, each with a reference more, with the content of device blocks.

        `keys` are those of the first blocks; content that is found under them is shared, not
        copied, and what is copied is published under them. `NO_BLOCK` stays what it is. Returns
        None, and changes nothing, when the host has no room.
        """
        pool = self._pool
        found = [
            None if block == NO_BLOCK else pool.find(key)
            for block, key in zip(blocks, keys, strict=False)
        ]
        found += [None] * (len(blocks) - len(found))
        shared = [host for host in found if host is not None]
        copied = [
            index
            for index, block in enumerate(blocks)
            if block != NO_BLOCK and found[index] is None
        ]
        num_revived = sum(pool.ref_count(host) == 0 for host in shared)
        if len(copied) + num_revived > pool.num_free:
            return None
        for host in shared:
            pool.share(host)
        taken = pool.take(len(copied))
        assert taken is not None, "room was counted before"
        table = [NO_BLOCK if host is None else host for host in found]
        for index, host in zip(copied, taken[0], strict=True):
            self._copies.swap_out(blocks[index], host)
            if index < len(keys):
                pool.publish(host, keys[index])
            table[index] = host
        return table

    def keep(self, evicted: Iterable[tuple[int, BlockKey]]) -> None:
        """Keep what was published in device blocks that are given away, while there is room."""
        pool = self._pool
        if not pool.num_free:
            return
        for block, key in evicted:
            host = pool.find(key)
            if host is not None:
                pool.share(host)
            else:
                taken = pool.take(1)
                if taken is None:
                    return
                host = taken[0][0]
                self._copies.swap_out(block, host)
                pool.publish(host, key)
            pool.release([host])
