"""Block tables of sequences: grown on demand, returned at once.

Knows nothing of the scheduler's queues, of sampling or of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.block_pool import BlockPool
from octavo.sequence import Sequence


class KVCacheManager:
    """Map each sequence's tokens to blocks of `block_size` slots.

    tokens   0 … 15 │ 16 … 31 │ 32 … 40
    table    block 7 │ block 2 │ block 9   (slots 9 … 15 of block 9 are allocated, not used)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether the table could grow to `num_tokens` tokens now."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        return missing <= self._pool.num_free

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow `sequence.block_table` to hold `num_tokens` tokens.

        Returns False, and changes nothing, when the pool has too few free blocks.
        """
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self._pool.take(missing)
        if blocks is None:
            return False
        sequence.block_table.extend(blocks)
        return True

    def free(self, sequence: Sequence) -> None:
        """Return all blocks of `sequence`, tail first, and give it a new, empty table.

        The old list object is left to whoever still compares by identity (`executor.batch`).
        """
        self._pool.free(reversed(sequence.block_table))
        sequence.block_table = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount every block against the tables of all live sequences.

        Raises:
            EngineError: a block is leaked, shared or free while owned.
        """
        self._pool.check_integrity(
            block for sequence in sequences for block in sequence.block_table
        )
