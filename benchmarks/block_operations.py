"""Time block operations in pools of a thousand, a hundred thousand and a million blocks.

    python benchmarks/block_operations.py [--repeats 31] [--warm]

Prints microseconds a block and the ratio of the largest pool to the smallest, in two tables: what
the engine does with the 50 blocks of a sequence, and the operations of the bare block pool in it.
The pools are as they are in the long run: all free blocks are published, the blocks of a sequence
lie anywhere, and whatever is taken is evicted. Blocks are named where the engine names them, in the
first lookup of a prompt and in `publish`, and that counts. A lookup that finds nothing ends at its
first block, so there it is one block of each of 50 prompts.

All pools take turns in one run; medians over the repeats. Before each operation the processor's
caches are swept, as the forward pass between two steps does: else the small pool alone would lie in
them, and the ratio would tell the speed of memory. `--warm` leaves the sweep out, to show that.

Where the kernel gives huge pages on request only, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the
environment takes the cost of address translation out, which is most of what grows with the pool.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import click
import numpy as np
from quiet import QuietWatch
from script_options import COUNT

from octavo.cache.block_hash import BlockKey, block_key, chain_hash, root_hash
from octavo.cache.block_pool import BlockPool
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence

SIZES = (1_000, 100_000, 1_000_000)
BLOCK_SIZE = 16
NUM_BLOCKS = 50
"""Blocks of each sequence; divides every size."""
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
PARAMS = SamplingParams(temperature=0, max_tokens=1, seed=0)
#: More than the last-level cache of common servers.
SWEPT = np.zeros(128 * 2**20, np.uint8)

Times = dict[str, dict[int, list[float]]]
"""Microseconds a block of each repeat, by operation and size of the pool."""
Operation = tuple[str, Callable[[], object]]
"""Name, and what is timed: the operation on `NUM_BLOCKS` blocks."""


def make_sequence(number: int) -> Sequence:
    """Make the sequence of this number: its blocks' tokens, and one that is always computed."""
    token_ids = np.random.default_rng(number).integers(0, 2**31, NUM_TOKENS + 1).tolist()
    return Sequence(Request(str(number), tuple(token_ids), PARAMS))


class FullCache:
    """A cache manager whose pools are full of published blocks that nobody holds.

    Sequences are known by number. `known` are those whose blocks are on the device, the next to be
    evicted first.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
        self._random = random.Random(0)
        self._num_made = 0
        for pool in (self.manager.device_pool, self.manager.host_pool):
            self._shuffle(pool)
        tables = [self._fill() for _ in range((num_blocks + num_host_blocks) // NUM_BLOCKS)]
        num_known = num_blocks // NUM_BLOCKS
        numbers = range(self._num_made)[-num_known:]
        self.known = deque(self._random.sample(numbers, num_known))
        for number in self.known:
            for block in tables[number]:
                self.manager.device_pool.share(block)
            self.manager.device_pool.release(reversed(tables[number]))

    def new(self) -> Sequence:
        """Make a sequence whose blocks are nowhere."""
        self._num_made += 1
        return make_sequence(self._num_made - 1)

    def known_one(self) -> Sequence:
        """Make a sequence again whose blocks are on the device; it is no longer `known`."""
        index = self._random.randrange(len(self.known))
        number = self.known[index]
        del self.known[index]
        return make_sequence(number)

    def remember(self, sequence: Sequence) -> None:
        """Say that the blocks of a sequence have just been freed, others having been evicted."""
        self.known.append(int(sequence.request_id))
        if len(self.known) * NUM_BLOCKS > self.manager.num_blocks:
            self.known.popleft()

    def _fill(self) -> list[int]:
        """Publish the blocks of a new sequence, and return which they are."""
        sequence = self.new()
        self.manager.allocate(sequence, NUM_TOKENS)
        sequence.num_computed_tokens = NUM_TOKENS
        self.manager.publish(sequence)
        table = sequence.block_table
        self.manager.free(sequence)
        self.manager.pop_copies()
        return table

    def _shuffle(self, pool: BlockPool) -> None:
        taken = pool.take(pool.num_blocks)
        assert taken is not None
        self._random.shuffle(taken[0])
        pool.release(taken[0])


def new_sequence(cache: FullCache) -> Iterator[Operation]:
    """Live as a prompt that nothing is cached of."""
    manager, sequence = cache.manager, cache.new()
    others = [cache.new() for _ in range(NUM_BLOCKS)]
    yield "look up, none cached", lambda: [manager.find_cached(other) for other in others]
    yield "allocate, evict", lambda: manager.allocate(sequence, NUM_TOKENS)
    sequence.num_computed_tokens = NUM_TOKENS
    yield "publish", lambda: manager.publish(sequence)
    fork = sequence.fork(1)
    yield "fork", lambda: manager.fork(sequence, fork)
    yield "free a fork", lambda: manager.free(fork)
    yield "free", lambda: manager.free(sequence)
    cache.remember(sequence)


def known_sequence(cache: FullCache) -> Iterator[Operation]:
    """Live as a prompt that is cached."""
    manager, sequence = cache.manager, cache.known_one()
    yield "look up, all cached", lambda: manager.find_cached(sequence)
    prefix = manager.find_cached(sequence)
    assert len(prefix.sources) == NUM_BLOCKS
    yield "admit, all cached", lambda: manager.admit(sequence, prefix)
    manager.free(sequence)
    cache.remember(sequence)


def host_life(cache: FullCache) -> Iterator[Operation]:
    """Take blocks whose content goes to the host, and go there as well."""
    manager, sequence = cache.manager, cache.new()
    yield "allocate, evict to host", lambda: manager.allocate(sequence, NUM_TOKENS)
    sequence.num_computed_tokens = NUM_TOKENS
    manager.publish(sequence)
    assert len(manager.pop_copies().swap_out) == NUM_BLOCKS
    yield "swap out", lambda: manager.swap_out(sequence)
    assert len(manager.pop_copies().swap_out) == NUM_BLOCKS
    manager.free(sequence)
    cache.remember(sequence)


def new_blocks(cache: FullCache) -> Iterator[Operation]:
    """Take, publish and release blocks of the bare pool."""
    pool, sequence = cache.manager.device_pool, cache.new()
    keys = name_blocks(sequence)
    yield "find, none there", lambda: [pool.find(key) for key in keys]
    blocks: list[int] = []

    def take() -> None:
        taken = pool.take(NUM_BLOCKS)
        assert taken is not None
        blocks.extend(taken[0])

    def publish() -> None:
        for block, key in zip(blocks, keys, strict=True):
            pool.publish(block, key)

    yield "take", take
    yield "publish", publish
    yield "release", lambda: pool.release(reversed(blocks))
    cache.remember(sequence)


def known_blocks(cache: FullCache) -> Iterator[Operation]:
    """Find, share and release blocks of the bare pool."""
    pool, sequence = cache.manager.device_pool, cache.known_one()
    keys = name_blocks(sequence)
    blocks: list[int | None] = []
    yield "find", lambda: blocks.extend([pool.find(key) for key in keys])
    found = [block for block in blocks if block is not None]
    assert len(found) == NUM_BLOCKS

    def share() -> None:
        for block in found:
            pool.share(block)

    yield "share", share
    pool.release(reversed(found))
    cache.remember(sequence)


def name_blocks(sequence: Sequence) -> list[BlockKey]:
    """Name all full blocks of a sequence, as the cache does."""
    keys: list[BlockKey] = []
    for first in range(0, NUM_TOKENS, BLOCK_SIZE):
        parent = chain_hash(keys[-1]) if keys else root_hash("")
        keys.append(block_key(parent, sequence.token_ids[first : first + BLOCK_SIZE]))
    return keys


def measure(run: Callable[[], object], sweep: bool) -> float:
    """Return microseconds a block."""
    if sweep:
        np.add(SWEPT, 1, out=SWEPT)
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * 1e6 / NUM_BLOCKS


@click.command()
@click.option("--repeats", default=31, show_default=True, type=COUNT)
@click.option("--warm", is_flag=True, help="Leave out the sweep of the processor's caches.")
def main(repeats: int, warm: bool) -> None:
    """Time block operations in pools of three sizes."""
    device = {size: FullCache(size) for size in SIZES}
    with_host = {size: FullCache(size, num_host_blocks=size) for size in SIZES}
    tables = {
        "of a sequence": ((new_sequence, device), (known_sequence, device), (host_life, with_host)),
        "of the bare pool": ((new_blocks, device), (known_blocks, device)),
    }
    gc.collect()
    gc.freeze()
    for title, lives in tables.items():
        times: Times = defaultdict(lambda: defaultdict(list))
        with QuietWatch() as watch:
            for _ in range(repeats):
                for live, caches in lives:
                    for size, cache in caches.items():
                        for name, run in live(cache):
                            times[name][size].append(measure(run, not warm))
        show(title, times, watch)


def show(title: str, times: Times, watch: QuietWatch) -> None:
    noise = "" if watch.is_valid else f"   NO CLAIM: others {watch.foreign_share:.0%} of CPU"
    click.echo(f"{title + ', µs a block':26}" + "".join(f"{size:>12,}" for size in SIZES) + noise)
    for name, by_size in times.items():
        medians = [statistics.median(by_size[size]) for size in SIZES]
        cells = "".join(f"{median:12.2f}" for median in medians)
        click.echo(f"{name:26}{cells}{medians[-1] / medians[0]:8.2f}x")


if __name__ == "__main__":
    main()
