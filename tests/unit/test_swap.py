"""KV moves to host blocks and back, and evicted blocks live on there; blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.cache.prefix_cache import CachedBlock
from octavo.errors import EngineError
from octavo.sequence import Sequence


def run(manager: KVCacheManager, sequence: Sequence) -> Sequence:
    """Admit a sequence that needs nothing from the host, and compute all its tokens but none more.

    The copies of the step stay pending.
    """
    assert manager.admit(sequence, manager.find_cached(sequence)) is None
    assert manager.allocate(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish(sequence)
    return sequence


@pytest.fixture
def manager() -> KVCacheManager:
    """Four device blocks and four host blocks."""
    return KVCacheManager(num_blocks=4, block_size=4, num_host_blocks=4)


@pytest.fixture
def swapped(manager, make_sequence) -> Sequence:
    """Ten tokens computed, eleven known, in host blocks 0, 1 and 2; the copies are made."""
    sequence = run(manager, make_sequence("a", 10))
    sequence.append_token(1)
    assert manager.swap_out(sequence)
    assert manager.pop_copies().swap_out == ((0, 0), (1, 1), (2, 2))
    return sequence


def fill_device(manager: KVCacheManager, make_sequence) -> None:
    """Let another sequence come and go that leaves nothing of what was on the device."""
    filler = make_sequence("filler", [0])
    assert manager.allocate(filler, 16)
    manager.free(filler)
    manager.pop_copies()


def test_swapping_out_frees_the_device_and_keeps_what_was_computed(manager, swapped):
    assert (swapped.block_table, swapped.host_table) == ([], [0, 1, 2])
    assert (swapped.num_computed_tokens, swapped.num_writable_slots) == (10, 0)
    assert (manager.num_free_blocks, manager.num_used_host_blocks) == (4, 3)
    manager.check_integrity([swapped])


def test_it_comes_back_in_one_transfer(manager, swapped, make_sequence):
    fill_device(manager, make_sequence)
    prefix = manager.find_cached(swapped)
    assert prefix.sources == tuple(CachedBlock(host=host) for host in (0, 1, 2))
    assert (prefix.num_tokens, prefix.num_free_used) == (10, 3)
    assert manager.num_blocks_to_admit(prefix, 13) == 4
    transfer_id = manager.admit(swapped, prefix)
    assert swapped.block_table == [2, 3, 1]
    assert manager.pop_copies() == BlockCopies(
        swap_in=(SwapIn(transfer_id, ((0, 2), (1, 3), (2, 1))),)
    )
    assert manager.num_used_host_blocks == 3
    manager.arrive(swapped)
    assert (swapped.host_table, manager.num_used_host_blocks) == ([], 0)
    assert (swapped.num_published_blocks, swapped.num_writable_slots) == (2, 12)
    assert manager.allocate(swapped, 11)
    manager.check_integrity([swapped])


def test_blocks_still_on_the_device_are_not_copied_back(manager, swapped):
    prefix = manager.find_cached(swapped)
    assert prefix.sources == (CachedBlock(0), CachedBlock(1), CachedBlock(host=2))
    assert prefix.num_free_used == 3
    transfer_id = manager.admit(swapped, prefix)
    assert manager.pop_copies().swap_in == (SwapIn(transfer_id, ((2, 2),)),)
    assert swapped.block_table == [0, 1, 2]


def test_nothing_is_waited_for_when_all_is_still_on_the_device(manager, make_sequence):
    a = run(manager, make_sequence("a", 8))
    a.append_token(1)
    manager.swap_out(a)
    assert manager.admit(a, manager.find_cached(a)) is None
    assert (a.block_table, a.host_table, a.num_published_blocks) == ([0, 1], [], 2)
    assert manager.num_used_host_blocks == 0


def test_a_full_host_pool_refuses_and_changes_nothing(make_sequence):
    manager = KVCacheManager(num_blocks=4, block_size=4, num_host_blocks=2)
    a = run(manager, make_sequence("a", 10))
    assert not manager.swap_out(a)
    assert (a.block_table, a.host_table, a.num_published_blocks) == ([0, 1, 2], [], 2)
    assert manager.num_used_host_blocks == 0
    assert not manager.pop_copies()


def test_nothing_computed_is_nothing_to_swap(manager, make_sequence):
    a = make_sequence("a")
    manager.allocate(a, 8)
    assert not manager.swap_out(a)
    assert a.block_table == [0, 1]


def test_what_the_host_has_already_is_shared(manager, make_sequence):
    a = run(manager, make_sequence("a", 10))
    b = run(manager, make_sequence("b", [*range(10, 18), 5]))
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 1, 3])
    manager.swap_out(a)
    manager.swap_out(b)
    assert (a.host_table, b.host_table) == ([0, 1, 2], [0, 1, 3])
    assert manager.pop_copies().swap_out == ((0, 0), (1, 1), (2, 2), (3, 3))
    manager.free(a)
    assert manager.num_used_host_blocks == 3
    manager.check_integrity([b])


def test_an_ended_swapped_sequence_gives_back_its_host_blocks(manager, swapped):
    manager.free(swapped)
    assert (swapped.host_table, manager.num_used_host_blocks) == ([], 0)
    assert list(manager.host_pool.free_blocks()) == [2, 3, 1, 0]


def test_evicted_blocks_are_found_on_the_host(manager, make_sequence):
    manager.free(run(manager, make_sequence("a", 10)))
    b = make_sequence("b", [0] * 13)
    manager.admit(b, manager.find_cached(b))
    assert manager.allocate(b, 13)
    assert b.block_table == [2, 3, 1, 0]
    assert manager.pop_copies().swap_out == ((1, 0), (0, 1))
    assert manager.num_used_host_blocks == 0
    manager.free(b)

    c = make_sequence("c", 10)
    prefix = manager.find_cached(c)
    assert prefix.sources == (CachedBlock(host=1), CachedBlock(host=0))
    transfer_id = manager.admit(c, prefix)
    assert (c.block_table, c.host_table, c.num_cached_tokens) == ([2, 3], [1, 0], 8)
    assert manager.pop_copies().swap_in == (SwapIn(transfer_id, ((1, 2), (0, 3))),)
    assert manager.find_cached(make_sequence("d", 10)).sources == prefix.sources
    manager.arrive(c)
    assert manager.find_cached(make_sequence("d", 10)).sources == (CachedBlock(2), CachedBlock(3))


def test_blocks_on_their_way_are_waited_for_rather_than_copied_twice(manager, make_sequence):
    manager.free(run(manager, make_sequence("a", 10)))
    fill_device(manager, make_sequence)
    b, c = make_sequence("b", 10), make_sequence("c", 6)
    assert not manager.find_cached(c).is_coming
    manager.admit(b, manager.find_cached(b))
    assert manager.find_cached(c).is_coming
    assert not manager.find_cached(make_sequence("d", [0] * 10)).is_coming
    manager.arrive(b)
    prefix = manager.find_cached(c)
    assert (prefix.sources, prefix.is_coming) == ((CachedBlock(b.block_table[0]),), False)


def test_a_partly_computed_block_on_its_way_is_waited_for_by_nobody(manager, make_sequence):
    a = make_sequence("a", 10)
    manager.prefixes.announce(a, 10)
    assert manager.allocate(a, 10)
    a.num_computed_tokens = 6
    manager.publish(a)
    assert manager.swap_out(a)
    fill_device(manager, make_sequence)
    manager.admit(a, manager.find_cached(a))
    assert len(a.block_keys) == 2
    manager.arrive(a)
    manager.free(a)
    manager.free(run(manager, make_sequence("b", 10)))
    fill_device(manager, make_sequence)
    prefix = manager.find_cached(make_sequence("c", 10))
    assert (prefix.num_tokens, prefix.is_coming) == (8, False)


def test_blocks_on_their_way_keep_their_host_blocks(manager, swapped, make_sequence):
    """Evictions in the same step must not overwrite what is read after them."""
    fill_device(manager, make_sequence)
    manager.admit(swapped, manager.find_cached(swapped))
    assert manager.host_pool.take(2) is None
    assert [manager.host_pool.ref_count(host) for host in (0, 1, 2)] == [1, 1, 1]


def test_the_host_evicts_its_least_recently_used_block(make_sequence):
    manager = KVCacheManager(num_blocks=2, block_size=4, num_host_blocks=1)
    manager.free(run(manager, make_sequence("a", [1] * 4)))
    manager.free(run(manager, make_sequence("b", [2] * 4)))
    filler = make_sequence("filler", [0])
    manager.allocate(filler, 8)
    # Both left for the one host block in the same step; only the last copy is made.
    assert manager.pop_copies().swap_out == ((1, 0),)
    assert manager.find_cached(make_sequence("c", [1] * 5)).num_tokens == 0
    assert manager.find_cached(make_sequence("d", [2] * 5)).num_tokens == 4


def test_a_block_copied_on_write_in_the_same_step_is_swapped_out_from_its_origin(make_sequence):
    """Swap-outs are made before copies: the copy does not hold anything yet."""
    manager = KVCacheManager(num_blocks=4, block_size=4, num_host_blocks=4)
    parent = run(manager, make_sequence("a", 6))
    child = parent.fork(1)
    manager.fork(parent, child)
    manager.allocate(child, 7)
    assert child.block_table == [0, 2]
    manager.swap_out(child)
    copies = manager.pop_copies()
    assert (copies.swap_out, copies.copies) == (((0, 0), (1, 1)), ((1, 2),))


def test_without_prefix_caching_a_sequence_still_swaps(make_sequence):
    manager = KVCacheManager(4, 4, num_host_blocks=4, prefix_caching=False)
    a = run(manager, make_sequence("a", 8))
    a.append_token(1)
    manager.swap_out(a)
    assert manager.find_cached(a).sources == (CachedBlock(host=0), CachedBlock(host=1))
    assert manager.admit(a, manager.find_cached(a)) is not None
    manager.arrive(a)
    assert (a.num_published_blocks, manager.num_cached_blocks) == (2, 0)


def test_a_restoring_sequence_cannot_be_touched(manager, swapped):
    manager.admit(swapped, manager.find_cached(swapped))
    message = "while its blocks come back from the host"
    with pytest.raises(EngineError, match=f"is freed {message}"):
        manager.free(swapped)
    with pytest.raises(EngineError, match=f"is swapped out {message}"):
        manager.swap_out(swapped)
    with pytest.raises(EngineError, match=f"is forked {message}"):
        manager.fork(swapped, swapped.fork(1))
    with pytest.raises(EngineError, match=f"is allocated for {message}"):
        manager.allocate(swapped, 13)
    manager.device_pool.release(swapped.block_table)
    manager.host_pool.release(swapped.host_table)
    with pytest.raises(EngineError, match="sequences are lost while their blocks come back"):
        manager.check_integrity([])


def test_nothing_arrives_that_was_not_sent_for(manager, swapped):
    with pytest.raises(EngineError, match="has nothing on its way from the host"):
        manager.arrive(swapped)


def test_admission_without_room_is_refused(manager, swapped, make_sequence):
    manager.allocate(make_sequence("b", [0]), 8)
    with pytest.raises(EngineError, match="is admitted with 3 blocks of 2 free ones"):
        manager.admit(swapped, manager.find_cached(swapped))
