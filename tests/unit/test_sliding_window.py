"""Where all layers have a window, blocks that no token sees any more are free; blocks hold 4."""

from __future__ import annotations

import pytest

import octavo_kernels.attention
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.cache.prefix_cache import CachedBlock
from octavo.sequence import NO_BLOCK, Sequence


@pytest.fixture
def manager() -> KVCacheManager:
    """Eight blocks of 4 tokens; a token sees itself and 4 before it."""
    return KVCacheManager(num_blocks=8, block_size=4, num_host_blocks=4, window=5)


def run(manager: KVCacheManager, sequence: Sequence, end: int) -> Sequence:
    if not sequence.block_table:
        assert manager.admit(sequence, manager.find_cached(sequence)) is None
    assert manager.allocate(sequence, end)
    manager.pop_copies()
    sequence.num_computed_tokens = end
    manager.publish(sequence)
    manager.check_integrity([sequence])
    return sequence


@pytest.mark.parametrize(
    ("end", "table"),
    [
        (4, [0]),
        (7, [0, 1]),
        (8, [NO_BLOCK, 1]),  # token 8 sees 4 to 8
        (11, [NO_BLOCK, 1, 2]),
        (12, [NO_BLOCK, NO_BLOCK, 2]),
        (14, [NO_BLOCK, NO_BLOCK, 2, 3]),
    ],
)
def test_blocks_go_when_the_next_token_does_not_see_them(manager, make_sequence, end, table):
    assert run(manager, make_sequence("a", 20), end).block_table == table
    assert manager.num_free_blocks == 8 - sum(block != NO_BLOCK for block in table)


def test_freed_heads_make_a_new_table(manager, make_sequence):
    a = run(manager, make_sequence("a", 20), 7)
    table = a.block_table
    run(manager, a, 8)
    assert table == [0, 1]
    assert a.block_table is not table


def test_freed_heads_are_published_and_evicted_like_others(manager, make_sequence):
    a = run(manager, make_sequence("a", 20), 14)
    assert list(manager.device_pool.free_blocks()) == [4, 5, 6, 7, 1, 0]
    manager.free(a)
    assert list(manager.device_pool.free_blocks()) == [3, 4, 5, 6, 7, 1, 0, 2]


def test_a_hit_needs_only_the_blocks_that_the_next_token_sees(manager, make_sequence):
    run(manager, make_sequence("a", 20), 13)
    manager.allocate(make_sequence("b", [0]), 20)  # evicts block 1
    assert manager.device_pool.key_of(1) is None
    c = make_sequence("c", 20)
    prefix = manager.find_cached(c)
    assert prefix.sources == (CachedBlock(), CachedBlock(), CachedBlock(2))
    assert (prefix.num_tokens, prefix.num_free_used) == (12, 0)
    manager.admit(c, prefix)
    assert (c.block_table, c.num_computed_tokens) == ([NO_BLOCK, NO_BLOCK, 2], 12)


def test_a_shorter_hit_is_found_when_the_window_of_the_longest_has_a_hole(make_sequence):
    manager = KVCacheManager(num_blocks=8, block_size=4, window=9)
    a = run(manager, make_sequence("a", 20), 16)
    assert a.block_table == [NO_BLOCK, NO_BLOCK, 2, 3]
    manager.free(a)
    assert list(manager.device_pool.free_blocks()) == [4, 5, 6, 7, 1, 0, 3, 2]
    manager.allocate(make_sequence("b", [0]), 20)  # evicts block 1
    # Blocks 2 and 3 are all that token 16 sees; a prompt that ends before needs 1 and 2.
    assert manager.find_cached(make_sequence("c", 20)).num_tokens == 16
    assert manager.find_cached(make_sequence("d", 14)).sources == (CachedBlock(0),)


def test_a_swapped_sequence_keeps_what_it_sees(manager, make_sequence):
    a = run(manager, make_sequence("a", 20), 14)
    assert manager.swap_out(a)
    assert a.host_table == [NO_BLOCK, NO_BLOCK, 0, 1]
    assert manager.pop_copies().swap_out == ((2, 0), (3, 1))
    manager.allocate(make_sequence("b", [0]), 32)
    manager.pop_copies()
    prefix = manager.find_cached(a)
    assert prefix.sources == (
        CachedBlock(),
        CachedBlock(),
        CachedBlock(host=0),
        CachedBlock(host=1),
    )
    assert (prefix.num_tokens, prefix.num_free_used) == (14, 2)


def test_the_cache_and_the_kernels_mean_the_same_by_no_block():
    """Said twice, because what the scheduler imports must not import torch."""
    assert octavo_kernels.attention.NO_BLOCK == NO_BLOCK
