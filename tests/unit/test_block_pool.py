"""Blocks are handed out in one promised order, counted, found by content, and recounted."""

from __future__ import annotations

import pytest

from octavo.cache.block_pool import BlockPool
from octavo.errors import EngineError


class CollidingKey(bytes):
    """A key whose place in any table is that of all others."""

    def __hash__(self) -> int:
        return 0


A, B, C = CollidingKey(b"a"), CollidingKey(b"b"), CollidingKey(b"c")
UNKNOWN = CollidingKey(b"d")


@pytest.fixture
def pool() -> BlockPool:
    """Four blocks, all free."""
    return BlockPool(4)


@pytest.fixture
def cached_pool(pool) -> BlockPool:
    """Blocks 0, 1, 2 were published as A, B, C and released tail first; 3 was never used."""
    pool.take(3)
    for block, key in enumerate((A, B, C)):
        assert pool.publish(block, key)
    pool.release([2, 1, 0])
    return pool


def test_take_hands_out_ids_in_order(pool):
    assert pool.take(3) == ([0, 1, 2], [])
    assert pool.take(1) == ([3], [])
    assert pool.num_free == 0


def test_blocks_of_no_use_to_anyone_are_reused_at_once_last_released_first(pool):
    pool.take(3)
    pool.release([2, 0])
    assert list(pool.free_blocks()) == [0, 2, 3]


def test_published_blocks_go_out_last_and_least_recently_used_first(cached_pool):
    assert list(cached_pool.free_blocks()) == [3, 2, 1, 0]
    assert (cached_pool.num_free, cached_pool.num_cached) == (4, 3)


def test_sharing_and_releasing_makes_a_block_the_most_recently_used(cached_pool):
    cached_pool.share(2)
    assert (cached_pool.num_free, cached_pool.num_cached) == (3, 2)
    cached_pool.release([2])
    assert list(cached_pool.free_blocks()) == [3, 1, 0, 2]


def test_unpublished_blocks_go_out_before_all_published_ones(cached_pool):
    assert cached_pool.take(2) == ([3, 2], [2])
    cached_pool.release([3, 2])
    assert list(cached_pool.free_blocks()) == [2, 3, 1, 0]


def test_a_block_is_found_until_it_is_handed_out_again(cached_pool):
    assert [cached_pool.find(key) for key in (A, B, C)] == [0, 1, 2]
    assert cached_pool.take(3) == ([3, 2, 1], [2, 1])
    assert [cached_pool.find(key) for key in (A, B, C)] == [0, None, None]
    assert [cached_pool.key_of(block) for block in range(4)] == [A, None, None, None]


def test_a_held_block_is_found_too(pool):
    pool.take(1)
    pool.publish(0, A)
    assert pool.find(A) == 0
    pool.share(0)
    assert pool.ref_count(0) == 2


def test_a_shared_block_is_free_only_when_all_have_released_it(cached_pool):
    cached_pool.share(0)
    cached_pool.share(0)
    cached_pool.release([0])
    assert list(cached_pool.free_blocks()) == [3, 2, 1]
    cached_pool.release([0])
    assert list(cached_pool.free_blocks()) == [3, 2, 1, 0]


def test_the_first_of_two_blocks_with_the_same_content_stands(pool):
    pool.take(2)
    assert pool.publish(1, A)
    assert not pool.publish(0, A)
    assert pool.publish(1, A)
    assert pool.find(A) == 1
    assert pool.key_of(0) is None


def test_keys_whose_hashes_collide_are_told_apart_by_their_content(cached_pool):
    assert cached_pool.find(UNKNOWN) is None
    cached_pool.take(1)
    assert cached_pool.publish(3, UNKNOWN)
    assert (cached_pool.find(UNKNOWN), cached_pool.find(A)) == (3, 0)


def test_take_nothing_from_a_full_or_an_empty_pool(pool):
    assert pool.take(0) == ([], [])
    pool.take(4)
    assert pool.take(0) == ([], [])


def test_take_too_many_returns_none_and_changes_nothing(cached_pool):
    assert cached_pool.take(5) is None
    assert list(cached_pool.free_blocks()) == [3, 2, 1, 0]
    assert cached_pool.find(C) == 2
    cached_pool.check_integrity([])


def test_a_pool_may_have_no_blocks():
    pool = BlockPool(0)
    assert pool.take(1) is None
    assert pool.take(0) == ([], [])
    assert pool.find(A) is None
    pool.check_integrity([])


def test_fewer_blocks_than_none_are_refused():
    with pytest.raises(EngineError, match=r"^a block pool cannot have -3 blocks; give 0 or more$"):
        BlockPool(-3)


@pytest.mark.parametrize("block", [1, -1, 4, 10**9])
def test_misuse_of_a_block_that_nobody_holds_raises(pool, block):
    pool.take(1)
    with pytest.raises(EngineError, match=rf"^block {block} is released but nobody holds it$"):
        pool.release([block])
    with pytest.raises(EngineError, match=rf"^block {block} is published but nobody holds it$"):
        pool.publish(block, A)
    with pytest.raises(EngineError, match=rf"^block {block} is shared but nobody holds or pub"):
        pool.share(block)
    pool.check_integrity([0])


def test_releasing_more_often_than_held_raises(pool):
    pool.take(2)
    with pytest.raises(EngineError, match=r"^block 1 is released but nobody holds it$"):
        pool.release([1, 1])


def test_a_block_stands_for_one_content_only(pool):
    pool.take(1)
    pool.publish(0, A)
    with pytest.raises(EngineError, match=r"^block 0 is published twice, under two keys$"):
        pool.publish(0, B)


def test_integrity_holds_whoever_owns_the_blocks(cached_pool):
    cached_pool.share(0)
    cached_pool.share(0)
    cached_pool.take(1)
    cached_pool.check_integrity(iter([0, 3, 0]))


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([0], r"are \{1: \(1, 0\)\}"),
        ([0, 1, 1], r"are \{1: \(1, 2\)\}"),
        ([], r"are \{0: \(1, 0\), 1: \(1, 0\)\}"),
        ([0, 1, 2], r"are \{2: \(0, 1\)\}"),
        ([0, 1, 4], r"\[4\] are owned but blocks go from 0 to 3"),
        ([0, 1, -1], r"\[-1\] are owned but blocks go from 0 to 3"),
    ],
    ids=["leak", "two owners", "all leaked", "owned and free", "past the end", "negative"],
)
def test_integrity_finds_wrong_owners(pool, owned, message):
    pool.take(2)
    with pytest.raises(EngineError, match=message):
        pool.check_integrity(owned)


def damage_link(pool: BlockPool) -> None:
    pool._nodes[4 * 3] = 3


def damage_back_link(pool: BlockPool) -> None:
    pool._nodes[4 * 1 + 1] = 3


def damage_order(pool: BlockPool) -> None:
    pool._nodes[4 * 1 + 3] = 0


def damage_count(pool: BlockPool) -> None:
    pool.num_free = 3


def damage_key(pool: BlockPool) -> None:
    pool._keys[0] = b""


def damage_index(pool: BlockPool) -> None:
    pool._index[A] = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_link, "broken at block 3"),
        (damage_back_link, "broken at block 1"),
        (damage_order, "published blocks go out before others"),
        (damage_count, "3 blocks are counted free and 3 cached, but 4 and 3 are"),
        (damage_key, r"blocks \[0\] are published but have no keys"),
        (damage_index, r"differ in \[\(b'a', 0\), \(b'a', 1\)\]"),
    ],
)
def test_integrity_finds_damage(cached_pool, damage, message):
    damage(cached_pool)
    with pytest.raises(EngineError, match=message):
        cached_pool.check_integrity([])


def test_a_withdrawn_block_is_found_no_more_and_is_reused_first():
    pool = BlockPool(3)
    blocks, _ = pool.take(2)
    pool.publish(blocks[0], A)
    pool.publish(blocks[1], B)
    for block in blocks:
        pool.withdraw(block)
        pool.withdraw(block)
    assert (pool.find(A), pool.find(B), pool.num_cached) == (None, None, 0)
    assert pool.publish(blocks[0], B)
    pool.check_integrity(blocks)
    pool.release(blocks)
    assert pool.num_cached == 1
    with pytest.raises(EngineError, match="withdrawn but nobody holds it"):
        pool.withdraw(blocks[0])
