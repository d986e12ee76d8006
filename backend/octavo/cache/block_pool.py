"""The pool of KV blocks: who holds how many references, what is free, what content can be found.

Knows nothing of sequences, tokens, tensors or how many layers a model has; a key is opaque to it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from octavo.cache.block_hash import BlockKey
from octavo.errors import EngineError


class BlockPool:
    """Hand out block ids, count references, and find blocks again by their content, each in O(1).

    Free blocks form one doubly linked list in the order in which they are handed out:

        front │ never used, or of no use to anyone │ published, least recently used first │ end

    A free published block keeps its content and can be found and shared until it is handed out.
    Running out is a normal event (`take` returns None); misuse raises.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise EngineError(f"a block pool cannot have {num_blocks} blocks; give 0 or more")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        """Blocks that nobody holds, published ones included."""
        self.num_cached = 0
        """Published blocks that nobody holds."""
        # Arrays of plain integers: lists of a million objects would miss the processor's caches.
        # The list is closed to a ring by the number after the last block.
        self._refs = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}

    def take(self, count: int) -> tuple[list[int], list[tuple[int, BlockKey]]] | None:
        """Take `count` free blocks, or None (and nothing changes) when fewer are free.

        Returns the blocks, each with one reference, and those among them that were published, with
        the keys under which they can no longer be found.
        """
        if count > self.num_free:
            return None
        ring = self.num_blocks
        following, refs, keys = self._next, self._refs, self._keys
        blocks: list[int] = []
        evicted: list[tuple[int, BlockKey]] = []
        block = following[ring]
        for _ in range(count):
            blocks.append(block)
            refs[block] = 1
            key = keys[block]
            if key is not None:
                evicted.append((block, key))
                keys[block] = None
                del self._index[key.hash]
            block = following[block]
        following[ring] = block
        self._previous[block] = ring
        self.num_free -= count
        self.num_cached -= len(evicted)
        return blocks, evicted

    def share(self, block: int) -> None:
        """Add a reference to a block that someone holds or that is published."""
        if self.ref_count(block) == 0:
            if self.key_of(block) is None:
                raise EngineError(f"block {block} is shared but nobody holds or published it")
            before, after = self._previous[block], self._next[block]
            self._next[before] = after
            self._previous[after] = before
            self.num_free -= 1
            self.num_cached -= 1
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each; a block that loses its last one is free.

        Of blocks released together the first is handed out again first among published ones, and
        last among the others, which go out before all published ones.
        """
        refs, ring = self._refs, self.num_blocks
        following, previous = self._next, self._previous
        for block in blocks:
            count = self.ref_count(block)
            if count == 0:
                raise EngineError(f"block {block} is released but nobody holds it")
            refs[block] = count - 1
            if count > 1:
                continue
            if self._keys[block] is None:
                before, after = ring, following[ring]
            else:
                before, after = previous[ring], ring
                self.num_cached += 1
            following[before] = previous[after] = block
            previous[block], following[block] = before, after
            self.num_free += 1

    def publish(self, block: int, key: BlockKey) -> bool:
        """Let a held block be found by its content, which must not change from now on.

        Returns whether the block stands for the key; False when another block stands for its hash,
        be its content the same or not.
        """
        if self.ref_count(block) == 0:
            raise EngineError(f"block {block} is published but nobody holds it")
        known = self._keys[block]
        if known is not None and known != key:
            raise EngineError(f"block {block} is published twice, under two keys")
        if self._index.setdefault(key.hash, block) != block:
            return False
        self._keys[block] = key
        return True

    def find(self, key: BlockKey) -> int | None:
        """Return the block published with this content, held or free, or None."""
        block = self._index.get(key.hash)
        if block is None:
            return None
        found = self._keys[block]
        # Hashes alone may collide.
        return block if found is not None and found.content == key.content else None

    def ref_count(self, block: int) -> int:
        """Return how many references a block has; 0 for what is not a block."""
        return self._refs[block] if 0 <= block < self.num_blocks else 0

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key a block is published under; None if it is not, or is not a block."""
        return self._keys[block] if 0 <= block < self.num_blocks else None

    def free_blocks(self) -> Iterator[int]:
        """Iterate over free blocks in the order in which they are handed out."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Recount everything against the references that `owned` lists, one entry each.

        Raises:
            EngineError: a reference is lost or made up, the list of free blocks is broken or out of
                order, or a block cannot be found under its key.
        """
        claims = Counter(owned)
        unknown = sorted(block for block in claims if not 0 <= block < self.num_blocks)
        if unknown:
            raise EngineError(f"{unknown} are owned but blocks go from 0 to {self.num_blocks - 1}")
        counts = {block: count for block, count in enumerate(self._refs) if count}
        wrong = {
            block: (counts.get(block, 0), claims[block])
            for block in sorted(counts.keys() | claims.keys())
            if counts.get(block, 0) != claims[block]
        }
        if wrong:
            raise EngineError(f"(references, owners) of blocks must be equal but are {wrong}")
        self._check_free_list()
        self._check_index()

    def _check_free_list(self) -> None:
        free = {block for block, count in enumerate(self._refs) if not count}
        listed: list[int] = []
        before = self.num_blocks
        for block in self.free_blocks():
            if self._previous[block] != before or len(listed) == len(free):
                raise EngineError(f"the list of free blocks is broken at block {block}")
            listed.append(block)
            before = block
        if self._previous[self.num_blocks] != before or set(listed) != free:
            raise EngineError(f"blocks {sorted(free)} are free but {sorted(listed)} are listed")
        cached = [self._keys[block] is not None for block in listed]
        if cached != sorted(cached):
            raise EngineError(f"published blocks go out before others in {listed}: {cached}")
        if (self.num_free, self.num_cached) != (len(listed), sum(cached)):
            raise EngineError(
                f"{self.num_free} blocks are counted free and {self.num_cached} cached, "
                f"but {len(listed)} and {sum(cached)} are"
            )

    def _check_index(self) -> None:
        keyed = {key.hash: block for block, key in enumerate(self._keys) if key is not None}
        if keyed != self._index:
            wrong = sorted(set(keyed.items()) ^ set(self._index.items()))
            raise EngineError(f"blocks and the index of their hashes differ in {wrong}")
