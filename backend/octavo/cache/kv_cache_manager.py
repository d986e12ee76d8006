"""Block tables of sequences: grown on demand, shared, found again, moved to the host and back.

Knows nothing of the scheduler's queues, of sampling or of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from octavo.cache.block_copies import BlockCopies
from octavo.cache.block_pool import BlockPool
from octavo.cache.host_tier import HostTier
from octavo.cache.pending_copies import PendingCopies
from octavo.cache.prefix_cache import CachedPrefix, PrefixCache
from octavo.errors import EngineError
from octavo.sequence import NO_BLOCK, Sequence


class KVCacheManager:
    """Map each sequence's tokens to blocks of `block_size` slots.

    tokens   0 … 15 │ 16 … 31 │ 32 … 40
    table    block 7 │ block 2 │ block 9   (slots 9 … 15 of block 9 are allocated, not used)

    Full blocks are published and shared by all that begin alike, unless `prefix_caching` is off.
    Host blocks hold the KV of swapped sequences, and published blocks that had to leave the device.

    Args:
        window: how many tokens back a token sees, itself included; None: all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.device_pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.num_query_tokens = 0
        """Prompt tokens that were looked up when their sequences were first admitted."""
        self.num_hit_tokens = 0
        """Those of them whose KV was found."""
        self._window = window
        self.prefixes = PrefixCache(
            self.device_pool, self.host_pool, block_size, window, is_enabled=prefix_caching
        )
        """Names of blocks; the scheduler tells it what steps compute."""
        self._copies = PendingCopies()
        self._host = HostTier(self.host_pool, self._copies)
        self._restoring: set[Sequence] = set()

    @property
    def num_blocks(self) -> int:
        """Device blocks, free or not."""
        return self.device_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that no sequence holds."""
        return self.device_pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Those of them whose content can still be found."""
        return self.device_pool.num_cached

    @property
    def num_host_blocks(self) -> int:
        """Host blocks, free or not."""
        return self.host_pool.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that sequences hold."""
        return self.host_pool.num_blocks - self.host_pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, sequence: Sequence) -> CachedPrefix:
        """Return what of the KV of a sequence without device blocks exists; changes no block."""
        return self.prefixes.find(sequence)

    def num_blocks_to_admit(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """Return how many free blocks it takes to hold `num_tokens` tokens behind a prefix."""
        return prefix.num_free_used + self.num_blocks_for(num_tokens) - len(prefix.sources)

    def num_blocks_freed_by(self, sequences: Iterable[Sequence], prefix: CachedPrefix) -> int:
        """Return how many blocks, beside those of `prefix`, would be free if all gave back."""
        claims = Counter(block for sequence in sequences for block in sequence.block_table)
        for source in prefix.sources:
            claims.pop(source.device, None)
        return sum(self.device_pool.ref_count(block) == count for block, count in claims.items())

    def admit(self, sequence: Sequence, prefix: CachedPrefix) -> int | None:
        """Give `sequence` the blocks of `prefix`, which `find_cached` has just returned.

        Mutates its table and counts. Returns the id of a transfer if host blocks have to be copied:
        until `arrive`, the table may not be used; else None. Raises EngineError if it has blocks
        already, the prefix no longer holds, or there is no room.
        """
        if sequence.block_table:
            raise EngineError(f"{sequence} is admitted but has blocks already")
        current = self.find_cached(sequence)
        if prefix.sources != current.sources:
            raise EngineError(f"{sequence} is admitted with a prefix that no longer holds")
        if current.num_free_used > self.num_free_blocks:
            room = f"{current.num_free_used} blocks of {self.num_free_blocks} free ones"
            raise EngineError(f"{sequence} is admitted with {room}")
        if self.prefixes.is_enabled and not sequence.num_preemptions:
            self.num_query_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += prefix.num_tokens
            sequence.num_cached_tokens = prefix.num_tokens
        transfer_id = self._use(sequence, prefix)
        sequence.num_computed_tokens = prefix.num_tokens
        sequence.num_writable_slots = len(sequence.block_table) * self.block_size
        if transfer_id is None:
            sequence.num_published_blocks = prefix.num_tokens // self.block_size
        return transfer_id

    def arrive(self, sequence: Sequence) -> None:
        """Let `sequence` use its table, now that its transfer is done; its host blocks go back."""
        if sequence not in self._restoring:
            raise EngineError(f"{sequence} has nothing on its way from the host")
        self._restoring.remove(sequence)
        self.prefixes.arrive(sequence)
        self._release_host(sequence)
        self.publish(sequence)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the slots from `num_computed_tokens` to `num_tokens` writable.

        Grows the table, and replaces a partly filled block that others hold too by a copy. Returns
        False, and changes nothing, when the pool has too few free blocks.
        """
        if num_tokens <= sequence.num_writable_slots:
            return True
        self._refuse_restoring(sequence, "allocated for")
        table = sequence.block_table
        num_full, num_partial = divmod(sequence.num_computed_tokens, self.block_size)
        must_copy = num_partial > 0 and self.device_pool.ref_count(table[num_full]) > 1
        num_missing = max(0, self.num_blocks_for(num_tokens) - len(table))
        blocks = self._take(num_missing + must_copy)
        if blocks is None:
            return False
        if must_copy:
            shared, own = table[num_full], blocks.pop()
            self._copies.copy(shared, own)
            self.device_pool.release([shared])
            table = sequence.block_table = [*table[:num_full], own, *table[num_full + 1 :]]
        table.extend(blocks)
        sequence.num_writable_slots = len(table) * self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer computed full blocks to the prefix cache, and let go what no token sees any more.

        What steps under way compute is not there yet.
        """
        num_tokens = sequence.num_computed_tokens - sequence.num_unlanded_tokens
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_published_blocks:
            self.prefixes.publish(sequence, num_full)
        if self._window is not None:
            self._release_unseen(sequence, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has no blocks, share all that `parent` has computed.

        Either copies a partly filled last block before it writes there.
        """
        self._refuse_restoring(parent, "forked")
        if child.block_table or child.host_table:
            raise EngineError(f"{child} is a fork but has blocks already")
        num_computed = parent.num_computed_tokens
        child.block_table = parent.block_table[: self.num_blocks_for(num_computed)]
        for block in child.block_table:
            if block != NO_BLOCK:
                self.device_pool.share(block)
        child.num_computed_tokens = child.num_writable_slots = num_computed
        child.num_unlanded_tokens = parent.num_unlanded_tokens
        child.num_published_blocks = parent.num_published_blocks
        if num_computed % self.block_size:
            parent.num_writable_slots = num_computed

    def swap_out(self, sequence: Sequence) -> bool:
        """Move what `sequence` has computed to host blocks, and give back its device blocks.

        Content that the host has already is shared, not copied. `num_computed_tokens` stays.
        Returns False, and changes nothing, when nothing is computed or the host has no room.
        """
        self._refuse_restoring(sequence, "swapped out")
        blocks = sequence.block_table[: self.num_blocks_for(sequence.num_computed_tokens)]
        keys = sequence.block_keys[: sequence.num_published_blocks]
        host_table = self._host.store(blocks, keys) if blocks else None
        if host_table is None:
            return False
        self._release_device(sequence)
        sequence.host_table = host_table
        return True

    def free(self, sequence: Sequence) -> None:
        """Return all blocks of `sequence`, tail first, and give it a new, empty table.

        The old list object is left to whoever still compares by identity (`executor.batch`).
        """
        self._refuse_restoring(sequence, "freed")
        self._release_device(sequence)
        self._release_host(sequence)

    def pop_copies(self) -> BlockCopies:
        """Return the copies that the planned step needs, and begin the next one."""
        self.prefixes.end_plan()
        return self._copies.pop()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount every block against the tables of all sequences that have any.

        Raises:
            EngineError: a block is lost, free while held, held by more or fewer sequences than it
                has references, or missing from a table; or a restoring sequence is missing.
        """
        sequences = list(sequences)
        self.device_pool.check_integrity(_held(sequence.block_table for sequence in sequences))
        self.host_pool.check_integrity(_held(sequence.host_table for sequence in sequences))
        for sequence in sequences:
            num_blocks = self.num_blocks_for(sequence.num_computed_tokens)
            if num_blocks > len(sequence.block_table or sequence.host_table):
                raise EngineError(f"{sequence} has computed more than its blocks hold")
        if not self._restoring.issubset(sequences):
            raise EngineError("sequences are lost while their blocks come back")

    def _take(self, count: int) -> list[int] | None:
        """Take device blocks; what was published in them goes to the host, if it has room."""
        taken = self.device_pool.take(count)
        if taken is None:
            return None
        blocks, evicted = taken
        self._host.keep((block, self.device_pool.former_key(block)) for block in evicted)
        return blocks

    def _use(self, sequence: Sequence, prefix: CachedPrefix) -> int | None:
        """Fill the table from the sources; return the id of a transfer if one is needed."""
        hosts = [host for _, host in prefix.sources if host != NO_BLOCK]
        # All that is needed is held before anything is taken: taking evicts.
        for device, _ in prefix.sources:
            if device != NO_BLOCK:
                self.device_pool.share(device)
        if not sequence.host_table:
            for host in hosts:
                self.host_pool.share(host)
            sequence.host_table = list(hosts)
        targets = self._take(len(hosts))
        assert targets is not None, "room was counted before"
        own = iter(targets)
        table = [device if host == NO_BLOCK else next(own) for device, host in prefix.sources]
        sequence.block_table = table
        if not hosts:
            self._release_host(sequence)
            return None
        self._restoring.add(sequence)
        self.prefixes.expect(sequence, prefix)
        return self._copies.swap_in(list(zip(hosts, targets, strict=True)))

    def _release_unseen(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the blocks that no token after the first `num_tokens` sees."""
        table = sequence.block_table
        end = start = self.prefixes.first_visible(num_tokens)
        while start and table[start - 1] != NO_BLOCK:
            start -= 1
        if start < end:
            sequence.block_table = [NO_BLOCK] * end + table[end:]
            self.device_pool.release(reversed(table[start:end]))

    def _release_device(self, sequence: Sequence) -> None:
        self.device_pool.release(_held([reversed(sequence.block_table)]))
        sequence.block_table = []
        sequence.num_published_blocks = sequence.num_writable_slots = 0
        sequence.num_unlanded_tokens = 0

    def _release_host(self, sequence: Sequence) -> None:
        self.host_pool.release(_held([reversed(sequence.host_table)]))
        sequence.host_table = []

    def _refuse_restoring(self, sequence: Sequence, what: str) -> None:
        if sequence in self._restoring:
            raise EngineError(f"{sequence} is {what} while its blocks come back from the host")


def _held(tables: Iterable[Iterable[int]]) -> Iterator[int]:
    """Iterate over the blocks of tables, without the places where none is left."""
    return (block for table in tables for block in table if block != NO_BLOCK)
