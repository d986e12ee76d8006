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
        # What is kept of block b lies together, in one line of the processor's caches, for in a
        # large pool each block is far from the last one:
        #
        #     4 b       4 b + 1        4 b + 2      4 b + 3
        #     next      previous       references   is published
        #
        # The number after the last block closes the list of free blocks to a ring.
        self._nodes = array("i", bytes(16 * (num_blocks + 1)))
        self._nodes[::4] = array("i", [*range(1, num_blocks + 1), 0])
        self._nodes[1::4] = array("i", [num_blocks, *range(num_blocks)])
        # A block that is handed out keeps its last key, and the index its entry, until it is
        # published anew: forgetting a key touches memory that was left alone for long.
        self._keys: list[BlockKey] = [b""] * num_blocks
        self._index: dict[BlockKey, int] = {}

    def take(self, count: int) -> tuple[list[int], list[int]] | None:
        """Take `count` free blocks, or None (and nothing changes) when fewer are free.

        Returns the blocks, each with one reference, and those among them that were published: they
        are evicted, and can no longer be found.
        """
        if count > self.num_free:
            return None
        nodes, ring = self._nodes, self.num_blocks
        blocks: list[int] = []
        evicted: list[int] = []
        block = nodes[4 * ring]
        for _ in range(count):
            blocks.append(block)
            node = 4 * block
            nodes[node + 2] = 1
            if nodes[node + 3]:
                nodes[node + 3] = 0
                evicted.append(block)
            block = nodes[node]
        nodes[4 * ring] = block
        nodes[4 * block + 1] = ring
        self.num_free -= count
        self.num_cached -= len(evicted)
        return blocks, evicted

    def share(self, block: int) -> None:
        """Add a reference to a block that someone holds or that is published."""
        if self.ref_count(block) == 0:
            if self.key_of(block) is None:
                raise EngineError(f"block {block} is shared but nobody holds or published it")
            before, after = self._nodes[4 * block + 1], self._nodes[4 * block]
            self._nodes[4 * before] = after
            self._nodes[4 * after + 1] = before
            self.num_free -= 1
            self.num_cached -= 1
        self._nodes[4 * block + 2] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each; a block that loses its last one is free.

        Of blocks released together the first is handed out again first among published ones, and
        last among the others, which go out before all published ones.
        """
        nodes, ring = self._nodes, self.num_blocks
        for block in blocks:
            node = 4 * block
            count = nodes[node + 2] if 0 <= block < ring else 0
            if count == 0:
                raise EngineError(f"block {block} is released but nobody holds it")
            nodes[node + 2] = count - 1
            if count > 1:
                continue
            if nodes[node + 3]:
                before, after = nodes[4 * ring + 1], ring
                self.num_cached += 1
            else:
                before, after = ring, nodes[4 * ring]
            nodes[4 * before] = nodes[4 * after + 1] = block
            nodes[node], nodes[node + 1] = after, before
            self.num_free += 1

    def publish(self, block: int, key: BlockKey) -> bool:
        """Let a held block be found by its content, which must not change from now on.

        Returns whether the block stands for the key; False when another block does already.
        """
        if self.ref_count(block) == 0:
            raise EngineError(f"block {block} is published but nobody holds it")
        if self._nodes[4 * block + 3]:
            if self._keys[block] != key:
                raise EngineError(f"block {block} is published twice, under two keys")
            return True
        standing = self._index.setdefault(key, block)
        if standing != block:
            if self._nodes[4 * standing + 3]:
                return False
            self._keys[standing] = b""
            self._index[key] = block
        former = self._keys[block]
        if former and former != key:
            del self._index[former]
        self._keys[block] = key
        self._nodes[4 * block + 3] = 1
        return True

    def withdraw(self, block: int) -> None:
        """Let a block be found no more, if it is published."""
        if self._nodes[4 * block + 3]:
            if not self.ref_count(block):
                raise EngineError(f"block {block} is withdrawn but nobody holds it")
            del self._index[self._keys[block]]
            self._keys[block] = b""
            self._nodes[4 * block + 3] = 0

    def find(self, key: BlockKey) -> int | None:
        """Return the block published with this content, held or free, or None."""
        block = self._index.get(key)
        return block if block is not None and self._nodes[4 * block + 3] else None

    def ref_count(self, block: int) -> int:
        """Return how many references a block has; 0 for what is not a block."""
        return self._nodes[4 * block + 2] if 0 <= block < self.num_blocks else 0

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key a block is published under; None if it is not, or is not a block."""
        is_published = 0 <= block < self.num_blocks and self._nodes[4 * block + 3]
        return self._keys[block] if is_published else None

    def former_key(self, block: int) -> BlockKey:
        """Return the key of a block that was just evicted."""
        return self._keys[block]

    def free_blocks(self) -> Iterator[int]:
        """Iterate over free blocks in the order in which they are handed out."""
        block = self._nodes[4 * self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._nodes[4 * block]

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
        counts = {block: count for block, count in enumerate(self._nodes[2::4]) if count}
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
        free = {block for block in range(self.num_blocks) if not self.ref_count(block)}
        listed: list[int] = []
        before = self.num_blocks
        for block in self.free_blocks():
            if self._nodes[4 * block + 1] != before or len(listed) == len(free):
                raise EngineError(f"the list of free blocks is broken at block {block}")
            listed.append(block)
            before = block
        if self._nodes[4 * self.num_blocks + 1] != before or set(listed) != free:
            raise EngineError(f"blocks {sorted(free)} are free but {sorted(listed)} are listed")
        cached = [bool(self._nodes[4 * block + 3]) for block in listed]
        if cached != sorted(cached):
            raise EngineError(f"published blocks go out before others in {listed}: {cached}")
        if (self.num_free, self.num_cached) != (len(listed), sum(cached)):
            raise EngineError(
                f"{self.num_free} blocks are counted free and {self.num_cached} cached, "
                f"but {len(listed)} and {sum(cached)} are"
            )

    def _check_index(self) -> None:
        nameless = [b for b, key in enumerate(self._keys) if self._nodes[4 * b + 3] and not key]
        if nameless:
            raise EngineError(f"blocks {nameless} are published but have no keys")
        keyed = {key: block for block, key in enumerate(self._keys) if key}
        if keyed != self._index:
            wrong = sorted(set(keyed.items()) ^ set(self._index.items()))
            raise EngineError(f"blocks and the index of their keys differ in {wrong}")
