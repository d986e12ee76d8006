"""Time the block pool's operations in pools of a thousand, a hundred thousand and a million blocks.

    python benchmarks/block_pool.py [--repeats 41] [--warm]

Prints microseconds a block, the median over batches of one sequence's 64 blocks, and the ratio of
the largest pool to the smallest. A miss is one block, for it ends a lookup. All pools take turns in
one run. Before each batch the processor's caches are swept, as the forward pass between two steps
does: else the small pool alone would lie in them, and the ratio would tell the speed of memory.
`--warm` leaves the sweep out, to show just that.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from octavo.cache.block_hash import BlockKey
from octavo.cache.block_pool import BlockPool

SIZES = (1_000, 100_000, 1_000_000)
BATCH = 64
#: More than the last-level cache of common servers.
SWEPT = np.zeros(128 * 2**20, np.uint8)


def new_keys(count: int) -> list[BlockKey]:
    return [os.urandom(96) for _ in range(count)]


def copy_of(key: BlockKey) -> BlockKey:
    """Make an equal key that is another object, as a lookup has it."""
    return bytes(bytearray(key))


class Bench:
    """Two full-size pools: one of plain blocks, one of published blocks, both freed at random.

    Each operation prepares its batch and returns what is to be timed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.random = random.Random(0)
        self.plain = BlockPool(num_blocks)
        taken = self.plain.take(num_blocks)
        assert taken is not None
        self.random.shuffle(taken[0])
        self.plain.release(taken[0])
        self.held: list[int] = []

        self.cached = BlockPool(num_blocks)
        num_chains = num_blocks // BATCH
        self.chains = [self.publish(new_keys(BATCH)) for _ in range(num_chains)]
        self.random.shuffle(self.chains)
        for chain in self.chains:
            self.cached.release(reversed(chain))
        rest = self.publish(new_keys(num_blocks - num_chains * BATCH))
        self.cached.release(rest)

    def publish(self, keys: list[BlockKey]) -> list[int]:
        """Take blocks that become those of new content; others are evicted."""
        taken = self.cached.take(len(keys))
        assert taken is not None
        for block, key in zip(taken[0], keys, strict=True):
            self.cached.publish(block, key)
        return taken[0]

    def take(self) -> Callable[[], object]:
        """Take unpublished blocks."""

        def run() -> None:
            taken = self.plain.take(BATCH)
            assert taken is not None
            self.held = taken[0]

        return run

    def release(self) -> Callable[[], object]:
        """Give back what `take` took."""
        return lambda: self.plain.release(reversed(self.held))

    def share_release(self) -> Callable[[], object]:
        """Use and give back a published prefix that was free."""
        chain, pool = self.random.choice(self.chains), self.cached

        def run() -> None:
            for block in chain:
                pool.share(block)
            pool.release(reversed(chain))

        return run

    def publish_evict(self) -> Callable[[], object]:
        """Take, publish and release; what was published in the blocks before is evicted."""
        keys = new_keys(BATCH)
        return lambda: self.cached.release(reversed(self.publish(keys)))

    def find_hit(self) -> Callable[[], object]:
        """Look up a prefix, block by block."""
        known = [self.cached.key_of(block) for block in self.random.choice(self.chains)]
        return self._find([copy_of(key) for key in known if key is not None])

    def find_miss(self) -> Callable[[], object]:
        """Look up what was never published."""
        return self._find(new_keys(1))

    def _find(self, keys: list[BlockKey]) -> Callable[[], object]:
        find = self.cached.find
        return lambda: [find(key) for key in keys]


#: How each is prepared, and its blocks.
OPERATIONS = {
    "take": (Bench.take, BATCH),
    "release": (Bench.release, BATCH),
    "share + release": (Bench.share_release, BATCH),
    "publish + evict": (Bench.publish_evict, BATCH),
    "find hit": (Bench.find_hit, BATCH),
    "find miss": (Bench.find_miss, 1),
}


def measure(run: Callable[[], object], sweep: bool) -> float:
    """Return microseconds."""
    if sweep:
        np.add(SWEPT, 1, out=SWEPT)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()

    benches = {size: Bench(size) for size in SIZES}
    times: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in SIZES} for name in OPERATIONS
    }
    for _ in range(options.repeats):
        for name, (prepare, num_blocks) in OPERATIONS.items():
            for size, bench in benches.items():
                run = prepare(bench)
                took_us = measure(run, sweep=not options.warm)
                times[name][size].append(took_us / num_blocks)

    print(f"{'µs a block':16}" + "".join(f"{size:>12,}" for size in SIZES) + f"{'ratio':>8}")
    for name, by_size in times.items():
        medians = [statistics.median(by_size[size]) for size in SIZES]
        cells = "".join(f"{median:12.3f}" for median in medians)
        print(f"{name:16}{cells}{medians[-1] / medians[0]:8.2f}")


if __name__ == "__main__":
    main()
