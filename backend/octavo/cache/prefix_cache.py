"""Names full blocks by their content, publishes them, and finds what of a sequence's KV exists.

Takes and releases no block. Knows nothing of queues or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Blocks
from dataclasses import dataclass
from typing import NamedTuple

from octavo.cache.block_hash import BlockKey, block_key, chain_hash, root_hash
from octavo.cache.block_pool import BlockPool
from octavo.sequence import NO_BLOCK, Sequence


class CachedBlock(NamedTuple):
    """Where the KV of one block lies; nowhere if no token to come sees it."""

    device: int = NO_BLOCK
    host: int = NO_BLOCK


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What of a waiting sequence's KV exists.

    Holds until a block is taken, released or published.
    """

    sources: tuple[CachedBlock, ...]
    """Where the first blocks come from, in order."""
    num_tokens: int
    """Computed tokens they stand for: at least one known token is left to compute."""
    num_free_used: int
    """Free device blocks that using them takes: found ones, and targets of host blocks."""
    is_coming: bool
    """Whether waiting saves work and blocks: one of its blocks is on its way from the host for
    another sequence, or the full block that comes next is being computed in a step."""


class PrefixCache:
    """Publish full blocks in the device pool, and find them there or in the host pool.

    Args:
        window: how many tokens back a token sees, itself included; None: all.
        is_enabled: if not, no block is ever named, published or found by its name.
    """

    def __init__(
        self,
        device: BlockPool,
        host: BlockPool,
        block_size: int,
        window: int | None,
        *,
        is_enabled: bool,
    ) -> None:
        self.is_enabled = is_enabled
        self._device = device
        self._host = host
        self._block_size = block_size
        self._window = window
        self._announced: set[BlockKey] = set()
        """What the step being planned computes."""
        self._planned: set[BlockKey] = set()
        """What the last planned step computes, if it is launched."""
        self._under_way: deque[set[BlockKey]] = deque()
        """What each step under way computes."""
        self._returning: set[BlockKey] = set()

    def keys(self, sequence: Sequence, count: int) -> list[BlockKey]:
        """Return the sequence's list of keys, extended to at least `count` full blocks."""
        keys, size = sequence.block_keys, self._block_size
        while len(keys) < count:
            first = len(keys) * size
            parent = chain_hash(keys[-1]) if keys else _root(sequence)
            keys.append(block_key(parent, sequence.token_ids[first : first + size]))
        return keys

    def first_visible(self, num_tokens: int) -> int:
        """Return the first block that any token after the first `num_tokens` still sees."""
        if self._window is None:
            return 0
        return max(0, num_tokens - self._window + 1) // self._block_size

    def find(self, sequence: Sequence) -> CachedPrefix:
        """Return the longest prefix whose blocks are cached, as far as the next token sees them.

        Of a swapped sequence that is all it has computed. Extends `sequence.block_keys`.
        """
        if sequence.host_table:
            sources = self._find_swapped(sequence)
            num_computed = sequence.num_computed_tokens
            is_coming = self._is_returning(sequence, sources, num_computed)
            return self._prefix(sources, num_computed, is_coming)
        if not self.is_enabled:
            return CachedPrefix((), 0, 0, False)
        limit = _num_reusable_tokens(sequence) // self._block_size
        if self._window is None:
            sources = self._find_from_start(sequence, limit)
        else:
            sources = self._find_from_end(sequence, limit)
        num_full = len(sources)
        is_computing = num_full < limit and self._is_computing(sequence, num_full)
        num_tokens = num_full * self._block_size
        is_coming = is_computing or self._is_returning(sequence, sources, num_tokens)
        return self._prefix(sources, num_tokens, is_coming)

    def publish(self, sequence: Sequence, num_full: int) -> None:
        """Publish its first full blocks, as far as that has not been done.

        Of two sequences that computed the same block, the first one's stands; the other keeps its
        own to itself.
        """
        if self.is_enabled:
            keys = self.keys(sequence, num_full)
            for index in range(sequence.num_published_blocks, num_full):
                if sequence.block_table[index] != NO_BLOCK:
                    self._device.publish(sequence.block_table[index], keys[index])
        sequence.num_published_blocks = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the device blocks of a sequence whose content is not to be trusted."""
        for block in sequence.block_table:
            if block != NO_BLOCK:
                self._device.withdraw(block)
        sequence.num_published_blocks = 0

    def announce(self, sequence: Sequence, num_tokens: int) -> None:
        """Remember that the step being planned computes its full blocks up to `num_tokens`."""
        if not self.is_enabled:
            return
        first = sequence.num_computed_tokens // self._block_size
        count = num_tokens // self._block_size
        if first < count:
            self._announced.update(self.keys(sequence, count)[first:count])

    def end_plan(self) -> None:
        """Take what is announced from now on as of another step."""
        self._planned, self._announced = self._announced, set()

    def launch(self) -> None:
        """Remember what the last planned step computes until it has landed."""
        self._under_way.append(self._planned)

    def land(self) -> None:
        """Forget what the oldest step under way computes: it can be published now."""
        self._under_way.popleft()

    def expect(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Remember that the full blocks of a prefix that the host has are on their way."""
        keys = self._keys_on_host(sequence, prefix.sources, prefix.num_tokens)
        self._returning.update(keys)

    def arrive(self, sequence: Sequence) -> None:
        """Forget that blocks of a sequence are on their way, with `num_computed_tokens` in all."""
        if self._returning:
            num_full = sequence.num_computed_tokens // self._block_size
            self._returning.difference_update(sequence.block_keys[:num_full])

    def _is_computing(self, sequence: Sequence, index: int) -> bool:
        computing = [keys for keys in (self._announced, *self._under_way) if keys]
        if not computing:
            return False
        key = self.keys(sequence, index + 1)[index]
        return any(key in keys for keys in computing)

    def _prefix(self, sources: list[CachedBlock], num_tokens: int, is_coming: bool) -> CachedPrefix:
        num_free_used = sum(
            self._device.ref_count(device) == 0 if device != NO_BLOCK else host != NO_BLOCK
            for device, host in sources
        )
        return CachedPrefix(tuple(sources), num_tokens, num_free_used, is_coming)

    def _is_returning(
        self, sequence: Sequence, sources: Blocks[CachedBlock], num_tokens: int
    ) -> bool:
        returning = self._returning
        return bool(returning) and not returning.isdisjoint(
            self._keys_on_host(sequence, sources, num_tokens)
        )

    def _keys_on_host(
        self, sequence: Sequence, sources: Blocks[CachedBlock], num_tokens: int
    ) -> list[BlockKey]:
        # A swapped sequence's last block may be partly computed: it is its own, whatever its key.
        keys = sequence.block_keys[: num_tokens // self._block_size]
        pairs = zip(keys, sources, strict=False)
        return [key for key, source in pairs if source.host != NO_BLOCK]

    def _find_block(self, sequence: Sequence, index: int) -> CachedBlock | None:
        key = self.keys(sequence, index + 1)[index]
        device = self._device.find(key)
        if device is not None:
            return CachedBlock(device)
        host = self._host.find(key)
        return None if host is None else CachedBlock(host=host)

    def _find_from_start(self, sequence: Sequence, limit: int) -> list[CachedBlock]:
        sources: list[CachedBlock] = []
        while len(sources) < limit:
            found = self._find_block(sequence, len(sources))
            if found is None:
                break
            sources.append(found)
        return sources

    def _find_from_end(self, sequence: Sequence, limit: int) -> list[CachedBlock]:
        """Look for the last run of blocks that is as long as a window.

            block     0   1   2   3   4   5
            cached    x   .   x   x   x   .      a window of two blocks: 0 … 4, without 0 … 2

        Blocks before the run are not needed, cached or not.
        """
        run: list[CachedBlock] = []
        end = limit
        for index in reversed(range(limit)):
            found = self._find_block(sequence, index)
            if found is None:
                run, end = [], index
                continue
            run.append(found)
            if index <= self.first_visible(end * self._block_size):
                break
        return [CachedBlock()] * (end - len(run)) + run[::-1]

    def _find_swapped(self, sequence: Sequence) -> list[CachedBlock]:
        """Return where the blocks are that it computed: some may still be on the device."""
        num_full = sequence.num_computed_tokens // self._block_size
        keys = self.keys(sequence, num_full)[:num_full] if self.is_enabled else []
        sources = [CachedBlock(host=host) for host in sequence.host_table]
        for index, key in enumerate(keys):
            device = self._device.find(key)
            if device is not None and sources[index].host != NO_BLOCK:
                sources[index] = CachedBlock(device)
        return sources


def _root(sequence: Sequence) -> bytes:
    version = b"" if sequence.adapter is None else sequence.adapter.version
    return root_hash(sequence.request.cache_salt, version)


def _num_reusable_tokens(sequence: Sequence) -> int:
    """Return how many first tokens need not be computed: those whose logits nobody needs."""
    if sequence.num_unscored_tokens:
        return sequence.num_prompt_tokens - sequence.num_unscored_tokens - 1
    return sequence.num_tokens - 1
