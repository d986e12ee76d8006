"""The pool of KV blocks: which are free, which are taken.

Knows nothing of sequences, tokens, tensors or how many layers a model has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.errors import EngineError


class BlockPool:
    """Hand out block ids in O(1) and take them back, oldest freed first.

    Running out is a normal event (`take` returns None); freeing a block that is not taken is misuse
    and raises.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise EngineError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None (and nothing changes) when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Return taken blocks; they are handed out again in the order given here."""
        for block in blocks:
            if not self._is_taken(block):
                raise EngineError(f"block {block} is freed but was not taken")
            self._taken[block] = 0
            self._free.append(block)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Recount every block against the block ids that sequences own.

        Raises:
            EngineError: a block is free twice, owned twice, both, or neither.
        """
        claims = [0] * self.num_blocks
        for block in self._free:
            claims[block] += 1
        for block in owned:
            if not self._is_taken(block):
                raise EngineError(f"block {block} is owned by a sequence but is not taken")
            claims[block] += 1
        wrong = {block: count for block, count in enumerate(claims) if count != 1}
        if wrong:
            raise EngineError(f"blocks must be free or owned exactly once; claims are {wrong}")
        if sum(self._taken) != self.num_blocks - len(self._free):
            raise EngineError(
                f"{sum(self._taken)} blocks are marked taken but "
                f"{self.num_blocks - len(self._free)} are not free"
            )

    def _is_taken(self, block: int) -> bool:
        return 0 <= block < self.num_blocks and bool(self._taken[block])
