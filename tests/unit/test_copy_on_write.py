"""Forks share all blocks, and copy a partly filled one when they first write it."""

from __future__ import annotations

import pytest

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError
from octavo.sequence import Sequence


@pytest.fixture
def manager() -> KVCacheManager:
    """Six blocks of 4 tokens."""
    return KVCacheManager(num_blocks=6, block_size=4)


@pytest.fixture
def forked(manager, make_sequence):
    """Fork a computed sequence of so many tokens; all know one token more."""

    def fork(num_tokens: int, num_children: int = 1) -> list[Sequence]:
        parent = make_sequence("a", num_tokens)
        manager.admit(parent, manager.find_cached(parent))
        manager.allocate(parent, num_tokens)
        parent.num_computed_tokens = num_tokens
        manager.publish(parent)
        family = [parent, *(parent.fork(index + 1) for index in range(num_children))]
        for child in family[1:]:
            manager.fork(parent, child)
        for token, sequence in enumerate(family):
            sequence.append_token(token)
        manager.check_integrity(family)
        return family

    return fork


def test_a_fork_shares_every_block(manager, forked):
    parent, child = forked(6)
    assert parent.block_table == child.block_table == [0, 1]
    assert child.block_table is not parent.block_table
    assert manager.num_free_blocks == 4
    assert (child.num_computed_tokens, child.num_published_blocks) == (6, 1)
    assert parent.num_writable_slots == child.num_writable_slots == 6


def test_the_first_to_write_copies_and_the_last_keeps_the_block(manager, forked):
    parent, child = forked(6)
    shared = parent.block_table
    assert manager.allocate(parent, 7)
    assert manager.allocate(child, 7)
    assert (parent.block_table, child.block_table) == ([0, 2], [0, 1])
    assert manager.pop_copies().copies == ((1, 2),)
    assert parent.num_writable_slots == child.num_writable_slots == 8
    # Readers compare tables by identity: what they have read must not change.
    assert shared == [0, 1]
    assert parent.block_table is not shared


def test_of_three_forks_two_copy(manager, forked):
    family = forked(6, num_children=2)
    for sequence in family:
        assert manager.allocate(sequence, 7)
    assert [sequence.block_table for sequence in family] == [[0, 2], [0, 3], [0, 1]]
    assert manager.pop_copies().copies == ((1, 2), (1, 3))


def test_a_full_last_block_is_never_copied(manager, forked):
    parent, child = forked(8)
    assert parent.num_writable_slots == child.num_writable_slots == 8
    manager.allocate(parent, 9)
    manager.allocate(child, 9)
    assert (parent.block_table, child.block_table) == ([0, 1, 2], [0, 1, 3])
    assert not manager.pop_copies()


def test_a_copy_and_growth_come_together_or_not_at_all(manager, forked):
    parent, child = forked(6)
    filler = child.fork(9)
    manager.allocate(filler, 12)
    assert manager.num_free_blocks == 1
    assert not manager.allocate(child, 9)
    assert (child.block_table, child.num_writable_slots) == ([0, 1], 6)
    assert manager.num_free_blocks == 1
    assert not manager.pop_copies()
    manager.free(filler)
    assert manager.allocate(child, 9)
    assert child.block_table == [0, 3, 2]
    assert manager.pop_copies().copies == ((1, 3),)
    manager.check_integrity([parent, child])


def test_whoever_is_left_alone_writes_in_place(manager, forked):
    parent, child = forked(6)
    manager.free(parent)
    assert manager.num_free_blocks == 4
    assert manager.allocate(child, 7)
    assert child.block_table == [0, 1]
    assert not manager.pop_copies()
    manager.free(child)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (6, 1)


def test_blocks_that_hold_nothing_yet_stay_the_parents(manager, make_sequence):
    parent = make_sequence("a", 6)
    manager.allocate(parent, 12)
    parent.num_computed_tokens = 6
    child = parent.fork(1)
    manager.fork(parent, child)
    assert (parent.block_table, child.block_table) == ([0, 1, 2], [0, 1])
    assert manager.allocate(parent, 12)
    assert parent.block_table == [0, 3, 2]


def test_a_fork_that_has_blocks_is_refused(manager, forked):
    parent, child = forked(6)
    with pytest.raises(EngineError, match="is a fork but has blocks already"):
        manager.fork(parent, child)
