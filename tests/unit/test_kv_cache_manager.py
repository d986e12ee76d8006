"""Block tables grow on demand and return at once; blocks here hold 4 tokens."""

from __future__ import annotations

import pytest

from octavo.cache.block_copies import BlockCopies
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


def test_writable_slots_are_those_of_the_table(manager, make_sequence):
    sequence = make_sequence()
    manager.allocate(sequence, 5)
    assert sequence.num_writable_slots == 8
    manager.free(sequence)
    assert sequence.num_writable_slots == 0


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
    assert (a.block_table, b.block_table, b.num_writable_slots) == ([0, 1, 2], [3], 4)
    assert manager.num_free_blocks == 1
    assert manager.allocate(b, 8)
    assert b.block_table == [3, 4]


def test_free_returns_blocks_tail_first(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 12)
    manager.free(a)
    assert manager.num_free_blocks == manager.num_blocks == 5
    manager.allocate(b, 20)
    assert b.block_table == [0, 1, 2, 3, 4]


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


def test_free_of_blocks_that_nobody_holds_raises(manager, make_sequence):
    sequence = make_sequence()
    sequence.block_table = [3]
    with pytest.raises(EngineError, match=r"^block 3 is released but nobody holds it$"):
        manager.free(sequence)


def test_blocks_freed_by_several_sequences_count_what_only_they_share(manager, make_sequence):
    a, b = make_sequence("a", 6), make_sequence("b", 1)
    manager.allocate(a, 6)
    a.num_computed_tokens = 6
    fork = a.fork(1)
    manager.fork(a, fork)
    manager.allocate(b, 1)
    nothing = manager.find_cached(make_sequence("c", [9]))
    assert manager.num_blocks_freed_by([a], nothing) == 0
    assert manager.num_blocks_freed_by([a, b], nothing) == 1
    assert manager.num_blocks_freed_by([a, fork], nothing) == 2


def test_a_step_without_copies_says_so(manager, make_sequence):
    manager.allocate(make_sequence(), 8)
    assert manager.pop_copies() == BlockCopies()
    assert not manager.pop_copies()


def test_integrity_finds_a_forgotten_sequence(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 4)
    manager.allocate(b, 8)
    manager.check_integrity([b, a])
    with pytest.raises(EngineError, match=r"are \{1: \(1, 0\), 2: \(1, 0\)\}"):
        manager.check_integrity([a])


def test_integrity_finds_a_block_in_two_tables(manager, make_sequence):
    a, b = make_sequence("a"), make_sequence("b")
    manager.allocate(a, 4)
    manager.allocate(b, 4)
    b.block_table[0] = a.block_table[0]
    with pytest.raises(EngineError, match=r"are \{0: \(1, 2\), 1: \(1, 0\)\}"):
        manager.check_integrity([a, b])


def test_integrity_finds_computed_tokens_without_blocks(manager, make_sequence):
    sequence = make_sequence()
    manager.allocate(sequence, 4)
    sequence.num_computed_tokens = 5
    with pytest.raises(EngineError, match="has computed more than its blocks hold"):
        manager.check_integrity([sequence])
