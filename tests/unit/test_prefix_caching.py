"""Sequences that begin alike share full blocks; blocks here hold 4 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.adapter import Adapter
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.cache.prefix_cache import CachedBlock
from octavo.errors import EngineError
from octavo.sequence import Sequence


@pytest.fixture
def manager() -> KVCacheManager:
    """Six blocks of 4 tokens, and no host blocks."""
    return KVCacheManager(num_blocks=6, block_size=4)


def run(manager: KVCacheManager, sequence: Sequence, end: int | None = None) -> Sequence:
    """Admit a sequence if need be, and compute its tokens up to `end`, by default all."""
    end = sequence.num_tokens if end is None else end
    if not sequence.block_table:
        manager.admit(sequence, manager.find_cached(sequence))
    assert manager.allocate(sequence, end)
    sequence.num_computed_tokens = end
    manager.publish(sequence)
    return sequence


def free_blocks(manager: KVCacheManager) -> list[int]:
    return list(manager.device_pool.free_blocks())


def test_nothing_is_found_at_first(manager, make_sequence):
    prefix = manager.find_cached(make_sequence("a", 9))
    assert (prefix.sources, prefix.num_tokens, prefix.num_free_used) == ((), 0, 0)


def test_full_blocks_of_a_running_sequence_are_shared(manager, make_sequence):
    run(manager, make_sequence("a", 10))
    b = make_sequence("b", 11)
    prefix = manager.find_cached(b)
    assert prefix.sources == (CachedBlock(0), CachedBlock(1))
    assert (prefix.num_tokens, prefix.num_free_used) == (8, 0)
    assert manager.num_blocks_to_admit(prefix, 12) == 1
    assert manager.admit(b, prefix) is None
    assert (b.block_table, b.num_computed_tokens, b.num_cached_tokens) == ([0, 1], 8, 8)
    assert (b.num_published_blocks, b.num_writable_slots) == (2, 8)
    assert (manager.num_query_tokens, manager.num_hit_tokens) == (21, 8)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
def test_the_last_token_is_always_computed(manager, make_sequence, num_tokens, num_hit):
    run(manager, make_sequence("a", 12))
    assert manager.find_cached(make_sequence("b", num_tokens)).num_tokens == num_hit


def test_hits_end_where_the_tokens_differ(manager, make_sequence):
    run(manager, make_sequence("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    b = make_sequence("b", [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert manager.find_cached(b).num_tokens == 4
    c = make_sequence("c", [0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.find_cached(c).num_tokens == 0


def test_freed_blocks_are_evicted_tails_before_heads(manager, make_sequence):
    a = run(manager, make_sequence("a", 14))
    manager.free(a)
    # The partly filled block 3 first, then those never used.
    assert free_blocks(manager) == [3, 4, 5, 2, 1, 0]
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (6, 3)


def test_two_freed_requests_with_one_prefix_leave_the_prefix_last(manager, make_sequence):
    a = run(manager, make_sequence("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    b = run(manager, make_sequence("b", [1, 2, 3, 4, 0, 0, 0, 0, 9]))
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 3, 4])
    manager.free(a)
    manager.free(b)
    assert free_blocks(manager) == [4, 2, 5, 1, 3, 0]


def test_a_hit_takes_free_blocks_out_of_the_order_of_eviction(manager, make_sequence):
    manager.free(run(manager, make_sequence("a", 14)))
    b = make_sequence("b", 9)
    prefix = manager.find_cached(b)
    assert (prefix.num_tokens, prefix.num_free_used) == (8, 2)
    assert manager.num_blocks_to_admit(prefix, 10) == 3
    manager.admit(b, prefix)
    assert free_blocks(manager) == [3, 4, 5, 2]


def test_evicted_tails_leave_shorter_hits(manager, make_sequence):
    manager.free(run(manager, make_sequence("a", 14)))
    other = run(manager, make_sequence("b", [0] * 16))
    assert other.block_table == [3, 4, 5, 2]
    assert manager.find_cached(make_sequence("c", 14)).num_tokens == 8
    manager.free(other)
    run(manager, make_sequence("d", [0] * 5))
    assert manager.num_hit_tokens == 4


def test_generated_tokens_are_reused_too(manager, make_sequence):
    a = run(manager, make_sequence("a", [1, 2, 3]))
    for token in (4, 5, 6, 7, 8):
        a.append_token(token)
        run(manager, a)
    manager.free(a)
    assert manager.find_cached(make_sequence("b", range(1, 12))).num_tokens == 8


def test_only_published_chunks_are_found(manager, make_sequence):
    a = run(manager, make_sequence("a", 12), 4)
    manager.allocate(a, 12)
    manager.free(a)
    assert manager.find_cached(make_sequence("b", 12)).num_tokens == 4


def test_an_announced_block_is_waited_for_until_its_step_has_landed(manager, make_sequence):
    a, b = make_sequence("a", 10), make_sequence("b", 10)
    manager.admit(a, manager.find_cached(a))
    manager.allocate(a, 10)
    manager.prefixes.announce(a, 10)
    assert manager.find_cached(b).is_coming
    assert not manager.find_cached(make_sequence("c", 4)).is_coming
    assert not manager.find_cached(make_sequence("d", [0] * 10)).is_coming
    manager.pop_copies()
    manager.prefixes.launch()
    assert manager.find_cached(b).is_coming
    manager.prefixes.land()
    assert not manager.find_cached(b).is_coming


def test_nobody_waits_for_a_step_that_was_planned_and_not_launched(manager, make_sequence):
    a, b = make_sequence("a", 10), make_sequence("b", 10)
    manager.admit(a, manager.find_cached(a))
    manager.allocate(a, 10)
    manager.prefixes.announce(a, 10)
    manager.pop_copies()
    assert not manager.find_cached(b).is_coming
    manager.pop_copies()
    manager.prefixes.launch()
    assert not manager.find_cached(b).is_coming


def test_a_block_computed_twice_at_once_stays_with_both(manager, make_sequence):
    a, b = make_sequence("a", 5), make_sequence("b", 5)
    for sequence in (a, b):
        manager.admit(sequence, manager.find_cached(sequence))
        manager.allocate(sequence, 5)
    for sequence in (b, a):
        sequence.num_computed_tokens = 5
        manager.publish(sequence)
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3])
    assert manager.find_cached(make_sequence("c", 5)).sources == (CachedBlock(2),)
    manager.free(a)
    manager.free(b)
    assert free_blocks(manager) == [3, 0, 1, 4, 5, 2]


def test_salts_keep_prefixes_apart(manager, make_request):
    def salted(name: str, salt: str) -> Sequence:
        return Sequence(replace(make_request(name, 9), cache_salt=salt))

    run(manager, salted("a", "x"))
    assert manager.find_cached(salted("b", "x")).num_tokens == 8
    assert manager.find_cached(salted("c", "y")).num_tokens == 0
    assert manager.find_cached(salted("d", "")).num_tokens == 0


def test_adapters_and_their_versions_keep_prefixes_apart(manager, make_request):
    def adapted(name: str, adapter: Adapter | None) -> Sequence:
        return Sequence(make_request(name, 9), adapter=adapter)

    run(manager, adapted("a", Adapter(0, b"first")))
    run(manager, adapted("b", None))
    found = [
        manager.find_cached(adapted("c", adapter)).sources[:1]
        for adapter in (Adapter(0, b"first"), Adapter(3, b"first"), Adapter(0, b"second"), None)
    ]
    assert found == [(CachedBlock(0),), (CachedBlock(0),), (), (CachedBlock(3),)]


def test_a_request_counts_as_looked_up_only_when_first_admitted(manager, make_sequence):
    a = run(manager, make_sequence("a", 9))
    manager.free(a)
    a.num_preemptions = 1
    a.num_computed_tokens = 0
    run(manager, a)
    assert (manager.num_query_tokens, manager.num_hit_tokens, a.num_cached_tokens) == (9, 0, 0)


def test_without_prefix_caching_nothing_is_published_or_found(make_sequence):
    manager = KVCacheManager(6, 4, prefix_caching=False)
    a = run(manager, make_sequence("a", 9))
    assert a.num_published_blocks == 2
    assert manager.find_cached(make_sequence("b", 9)).num_tokens == 0
    manager.free(a)
    assert (manager.num_cached_blocks, manager.num_query_tokens) == (0, 0)


def test_a_prefix_that_no_longer_holds_is_refused(manager, make_sequence):
    manager.free(run(manager, make_sequence("a", 9)))
    b = make_sequence("b", 9)
    prefix = manager.find_cached(b)
    manager.allocate(make_sequence("c"), 24)
    with pytest.raises(EngineError, match="is admitted with a prefix that no longer holds"):
        manager.admit(b, prefix)


def test_admitting_twice_is_refused(manager, make_sequence):
    a = run(manager, make_sequence("a", 9))
    with pytest.raises(EngineError, match="is admitted but has blocks already"):
        manager.admit(a, manager.find_cached(a))
