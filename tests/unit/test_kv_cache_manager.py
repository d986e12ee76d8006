"""Block tables grow on demand and return at once; blocks here hold 4 tokens."""

from __future__ import annotations

import pytest

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError


@pytest.fixture
def manager() -> KVCacheManager:
    """Five blocks of 4 tokens."""
    return KVCacheManager(num_blocks=5, block_size=4)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_tokens(manager, num_tokens, num_blocks):
    assert manager.num_blocks_for(num_tokens) == num_blocks


def test_a_table_grows_only_when_its_last_block_is_full(manager, make_sequence):
    sequence = make_sequence()
    tables = []
    for num_tokens in range(1, 10):
        assert manager.allocate(sequence, num_tokens)
        tables.append(list(sequence.block_table))
    assert tables == [[0]] * 4 + [[0, 1]] * 4 + [[0, 1, 2]]


def test_tables_of_two_sequences_interleave(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    for num_tokens in (4, 8):
        assert manager.allocate(a, num_tokens)
        assert manager.allocate(b, num_tokens)
    assert (a.block_table, b.block_table) == ([0, 2], [1, 3])


def test_a_table_never_shrinks(manager, make_sequence):
    sequence = make_sequence()
    manager.allocate(sequence, 12)
    assert manager.allocate(sequence, 1)
    assert sequence.block_table == [0, 1, 2]


def test_exhaustion_returns_false_and_changes_nothing(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 12)
    manager.allocate(b, 1)
    assert not manager.allocate(b, 13)
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3])
    assert manager.num_free_blocks == 1
    assert manager.allocate(b, 8)
    assert b.block_table == [3, 4]


def test_has_room_counts_what_the_sequence_already_owns(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 12)
    assert manager.has_room(a, 20)
    assert not manager.has_room(a, 21)
    assert manager.has_room(b, 8)
    assert not manager.has_room(b, 9)
    assert (a.block_table, b.block_table) == ([0, 1, 2], [])


def test_free_returns_blocks_tail_first(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 12)
    manager.free(a)
    assert manager.num_free_blocks == manager.num_blocks == 5
    manager.allocate(b, 20)
    assert b.block_table == [3, 4, 2, 1, 0]


def test_free_leaves_the_old_table_to_whoever_holds_it(manager, make_sequence):
    sequence = make_sequence()
    manager.allocate(sequence, 8)
    table = sequence.block_table
    manager.free(sequence)
    assert table == [0, 1]
    assert sequence.block_table == []
    assert sequence.block_table is not table


def test_free_of_a_sequence_without_blocks_does_nothing(manager, make_sequence):
    manager.free(make_sequence())
    assert manager.num_free_blocks == 5


def test_free_of_blocks_that_are_not_taken_raises(manager, make_sequence):
    sequence = make_sequence()
    sequence.block_table = [3]
    with pytest.raises(EngineError, match=r"^block 3 is freed but was not taken$"):
        manager.free(sequence)


def test_integrity_finds_a_forgotten_sequence(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 4)
    manager.allocate(b, 8)
    manager.check_integrity([b, a])
    with pytest.raises(EngineError, match=r"claims are \{1: 0, 2: 0\}"):
        manager.check_integrity([a])


def test_integrity_finds_a_shared_block(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 4)
    manager.allocate(b, 4)
    b.block_table[0] = a.block_table[0]
    with pytest.raises(EngineError, match=r"claims are \{0: 2, 1: 0\}"):
        manager.check_integrity([a, b])
