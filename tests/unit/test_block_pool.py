"""Blocks are handed out in order, taken back in order, and recounted."""

from __future__ import annotations

import pytest

from octavo.cache.block_pool import BlockPool
from octavo.errors import EngineError


@pytest.fixture
def pool() -> BlockPool:
    """Four blocks, all free."""
    return BlockPool(4)


def test_take_hands_out_ids_in_order(pool):
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(1) == [3]
    assert pool.num_free == 0


def test_freed_blocks_come_back_in_the_order_they_were_freed(pool):
    pool.take(4)
    pool.free([2, 0])
    pool.free([3])
    assert pool.take(3) == [2, 0, 3]


def test_never_taken_blocks_go_before_freed_ones(pool):
    pool.take(2)
    pool.free([1, 0])
    assert pool.take(4) == [2, 3, 1, 0]


def test_take_nothing_from_a_full_or_an_empty_pool(pool):
    assert pool.take(0) == []
    pool.take(4)
    assert pool.take(0) == []


def test_take_too_many_returns_none_and_changes_nothing(pool):
    pool.take(2)
    assert pool.take(3) is None
    assert pool.num_free == 2
    pool.check_integrity([0, 1])
    assert pool.take(2) == [2, 3]


@pytest.mark.parametrize("block", [1, -1, 4, 10**9])
def test_freeing_a_block_that_is_not_taken_raises(pool, block):
    pool.take(1)
    with pytest.raises(EngineError, match=rf"^block {block} is freed but was not taken$"):
        pool.free([block])


def test_freeing_twice_raises(pool):
    pool.take(2)
    with pytest.raises(EngineError, match=r"^block 1 is freed but was not taken$"):
        pool.free([1, 1])


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_a_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(EngineError, match=f"at least 1 block, not {num_blocks}"):
        BlockPool(num_blocks)


def test_integrity_holds_whoever_owns_the_blocks(pool):
    pool.check_integrity([])
    pool.take(3)
    pool.free([1])
    pool.check_integrity(iter([2, 0]))


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([0], r"claims are \{1: 0\}"),
        ([0, 1, 1], r"claims are \{1: 2\}"),
        ([], r"claims are \{0: 0, 1: 0\}"),
        ([0, 1, 2], "block 2 is owned by a sequence but is not taken"),
        ([0, 1, 4], "block 4 is owned by a sequence but is not taken"),
        ([0, 1, -1], "block -1 is owned by a sequence but is not taken"),
    ],
    ids=["leak", "two owners", "all leaked", "owned and free", "past the end", "negative"],
)
def test_integrity_finds_wrong_owners(pool, owned, message):
    pool.take(2)
    with pytest.raises(EngineError, match=message):
        pool.check_integrity(owned)


def test_integrity_finds_a_block_that_is_free_twice(pool):
    pool.take(1)
    pool._free.append(3)
    with pytest.raises(EngineError, match=r"claims are \{3: 2\}"):
        pool.check_integrity([0])


def test_integrity_finds_a_free_block_marked_taken(pool):
    pool.take(1)
    pool._taken[2] = 1
    with pytest.raises(EngineError, match="2 blocks are marked taken but 1 are not free"):
        pool.check_integrity([0])
