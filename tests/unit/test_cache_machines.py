"""Random histories of the pool and of the manager, compared after each step with plain models."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.cache.block_hash import BlockKey
from octavo.cache.block_pool import BlockPool
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.sequence import NO_BLOCK, Sequence

picks = st.integers(0, 1000)


class CollidingKey(bytes):
    """A key whose place in any table is one of two: only its content tells it apart."""

    def __hash__(self) -> int:
        return self[0] % 2


KEYS = [CollidingKey([number]) for number in range(16)]


class PoolMachine(RuleBasedStateMachine):
    """The model is a list of free blocks, a count for each block, and a map of keys."""

    num_steps = 0
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(num_blocks=st.integers(0, 12))
    def begin(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.keys: dict[int, BlockKey] = {}

    @property
    def held(self) -> list[int]:
        return [block for block, count in enumerate(self.refs) for _ in range(count)]

    @rule(count=st.integers(0, 13))
    def take(self, count):
        taken = self.pool.take(count)
        if count > len(self.free):
            assert taken is None
            return
        blocks, self.free = self.free[:count], self.free[count:]
        evicted = {block: self.keys.pop(block) for block in blocks if block in self.keys}
        assert taken == (blocks, list(evicted))
        assert {block: self.pool.former_key(block) for block in evicted} == evicted
        for block in blocks:
            self.refs[block] = 1
        self.happened["evicted"] += len(evicted)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=4))
    def fill(self, keys):
        """Take, publish and release, as a sequence that comes and goes."""
        self.take(len(keys))
        for offset, key in enumerate(keys if len(self.held) >= len(keys) else []):
            self.publish(len(self.held) - 1 - offset, key)
        if self.held:
            self.release(len(keys), 0)

    @precondition(lambda self: self.keys)
    @rule(pick=picks)
    def share_published(self, pick):
        self.share(sorted(self.keys)[pick % len(self.keys)] + 1)

    @rule(pick=picks)
    def share(self, pick):
        block = pick % (len(self.refs) + 2) - 1
        can = 0 <= block < len(self.refs) and (self.refs[block] > 0 or block in self.keys)
        if not can:
            with pytest.raises(EngineError):
                self.pool.share(block)
            return
        self.pool.share(block)
        if not self.refs[block]:
            self.free.remove(block)
            self.happened["revived"] += 1
        self.refs[block] += 1

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 12), pick=picks)
    def release(self, count, pick):
        start = pick % len(self.held)
        blocks = self.held[start : start + count][::-1]
        self.pool.release(blocks)
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.insert(len(self.free) if block in self.keys else 0, block)

    @precondition(lambda self: self.free)
    @rule(pick=picks)
    def misuse_a_free_block(self, pick):
        block = self.free[pick % len(self.free)]
        with pytest.raises(EngineError):
            self.pool.release([block])
        with pytest.raises(EngineError):
            self.pool.publish(block, KEYS[0])

    @precondition(lambda self: self.held)
    @rule(pick=picks, key=st.sampled_from(KEYS))
    def publish(self, pick, key):
        block = self.held[pick % len(self.held)]
        if self.keys.get(block, key) != key:
            with pytest.raises(EngineError):
                self.pool.publish(block, key)
            return
        standing = {known: other for other, known in self.keys.items()}.get(key, block)
        assert self.pool.publish(block, key) is (standing == block)
        if standing == block:
            self.keys[block] = key

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        by_key = {key: block for block, key in self.keys.items()}
        assert [self.pool.find(key) for key in KEYS] == [by_key.get(key) for key in KEYS]
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == sum(block in self.keys for block in self.free)
        self.pool.check_integrity(self.held)


class Memory:
    """Blocks of slots; a slot holds a token's whole past. Copies are made in the promised order."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        size = manager.block_size
        self.device = [[None] * size for _ in range(manager.num_blocks)]
        self.host = [[None] * size for _ in range(manager.num_host_blocks)]
        self.under_way: dict[int, tuple[tuple[int, int], ...]] = {}

    def step(self) -> None:
        """Make the copies that are pending; swap-ins only begin."""
        copies = self.manager.pop_copies()
        targets = [host for _, host in copies.swap_out]
        assert len(set(targets)) == len(targets)
        for device, host in copies.swap_out:
            self.host[host] = list(self.device[device])
        for source, target in copies.copies:
            self.device[target] = list(self.device[source])
        for swap_in in copies.swap_in:
            self.under_way[swap_in.transfer_id] = swap_in.pairs

    def arrive(self, transfer_id: int) -> None:
        for host, device in self.under_way.pop(transfer_id):
            self.device[device] = list(self.host[host])

    def write(self, sequence: Sequence, end: int) -> None:
        size = self.manager.block_size
        for position in range(sequence.num_computed_tokens, end):
            block = sequence.block_table[position // size]
            assert self.manager.device_pool.ref_count(block) == 1, "a shared block is written"
            assert self.manager.device_pool.key_of(block) is None, "a published block is written"
            self.device[block][position % size] = past_of(sequence, position)

    def check(self, sequence: Sequence, window: int | None) -> None:
        """What the next token sees must be the sequence's own past."""
        size, end = self.manager.block_size, sequence.num_computed_tokens
        begin = 0 if window is None else max(0, end - window + 1)
        for position in range(begin, end):
            slots = self.device[sequence.block_table[position // size]]
            assert slots[position % size] == past_of(sequence, position), (sequence, position)


def past_of(sequence: Sequence, position: int) -> tuple[str, tuple[int, ...]]:
    return sequence.request.cache_salt, tuple(sequence.token_ids[: position + 1])


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, share, grow, fork, leave for the host and return after any delay."""

    num_steps = 0
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        shape=st.tuples(st.integers(1, 14), st.sampled_from([1, 2, 4]), st.integers(0, 10)),
        prefix_caching=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([None, None, 1, 3, 5]),
    )
    def begin(self, shape, prefix_caching, window):
        num_blocks, block_size, num_host_blocks = shape
        self.window = window
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching,
            window=window,
        )
        self.memory = Memory(self.manager)
        self.out: list[Sequence] = []
        self.running: list[Sequence] = []
        self.restoring: dict[int, Sequence] = {}
        for change in (14, 5, 14):
            self.come(9, change, "")

    @rule(pick=st.integers(1, 11), change=st.integers(0, 14), salt=st.sampled_from(["", "", "x"]))
    def come(self, pick, change, salt):
        prompt = [*range(1, change + 1), *[0] * 14][:pick]
        params = SamplingParams(max_tokens=1, seed=0)
        self.out.append(Sequence(Request("a", tuple(prompt), params, cache_salt=salt)))
        self.admit(-1)

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def admit(self, pick):
        sequence = self.out[pick % len(self.out)]
        before = list(self.manager.device_pool.free_blocks())
        prefix = self.manager.find_cached(sequence)
        assert prefix == self.manager.find_cached(sequence)
        assert list(self.manager.device_pool.free_blocks()) == before
        assert prefix.num_tokens < sequence.num_tokens
        num_free = self.manager.num_free_blocks
        num_needed = self.manager.num_blocks_to_admit(prefix, sequence.num_tokens)
        if num_needed > num_free:
            return
        if sequence.host_table:
            assert prefix.num_tokens == sequence.num_computed_tokens
        self.out.remove(sequence)
        self.happened["hits"] += prefix.num_tokens > 0 and not sequence.host_table
        transfer_id = self.manager.admit(sequence, prefix)
        assert sequence.num_computed_tokens == prefix.num_tokens
        assert self.manager.num_free_blocks == num_free - prefix.num_free_used
        if transfer_id is None:
            self.running.append(sequence)
        else:
            self.restoring[transfer_id] = sequence
        grown = self.manager.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)
        assert grown + prefix.num_free_used == num_needed

    @precondition(lambda self: self.running)
    @rule(picks=st.lists(picks, min_size=2, max_size=6))
    def compute_many(self, picks):
        for pick in picks:
            self.compute(pick, 3, 0, aborts=False)

    @precondition(lambda self: self.running)
    @rule(pick=picks, count=st.integers(1, 7), token=st.integers(0, 2), aborts=st.booleans())
    def compute(self, pick, count, token, aborts):
        """One chunk of one sequence; an aborted one is never published."""
        sequence = self.running[pick % len(self.running)]
        if sequence.num_uncomputed_tokens == 0:
            sequence.append_token(token)
        end = min(sequence.num_tokens, sequence.num_computed_tokens + count)
        state = (list(sequence.block_table), list(self.manager.device_pool.free_blocks()))
        if not self.manager.allocate(sequence, end):
            assert state == (sequence.block_table, list(self.manager.device_pool.free_blocks()))
            return
        assert end <= sequence.num_writable_slots
        self.manager.prefixes.announce(sequence, end)
        self.memory.step()
        self.memory.check(sequence, self.window)
        self.memory.write(sequence, end)
        if aborts and count == 7:
            self.leave(sequence)
            return
        sequence.num_computed_tokens = end
        self.manager.publish(sequence)
        self.happened["computed"] += 1

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.manager.free(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def finish(self, pick):
        self.leave(self.running[pick % len(self.running)])

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def abort_outside(self, pick):
        self.manager.free(self.out.pop(pick % len(self.out)))

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def fork(self, pick):
        parent = self.running[pick % len(self.running)]
        child = parent.fork(1)
        self.memory.step()
        self.manager.fork(parent, child)
        child.append_token(7)
        self.running.append(child)
        self.happened["forks"] += 1

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def preempt_and_readmit(self, pick):
        self.preempt(pick)
        self.admit(-1)
        self.step()

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def preempt(self, pick):
        """May come right after an allocation, in the same step."""
        sequence = self.running[pick % len(self.running)]
        num_computed = sequence.num_computed_tokens
        if not sequence.num_uncomputed_tokens:
            sequence.append_token(1)
        state = self.state_of(sequence)
        self.running.remove(sequence)
        if self.manager.swap_out(sequence):
            assert sequence.num_computed_tokens == num_computed
            assert sequence.block_table == []
            self.happened["swaps"] += 1
        else:
            assert self.state_of(sequence) == state
            self.manager.free(sequence)
            sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.out.append(sequence)

    def state_of(self, sequence: Sequence) -> tuple[list[int], ...]:
        pools = (self.manager.device_pool, self.manager.host_pool)
        free = [list(pool.free_blocks()) for pool in pools]
        return list(sequence.block_table), list(sequence.host_table), *free

    @precondition(lambda self: self.running)
    @rule(pick=picks, more=st.integers(1, 5))
    def allocate_only(self, pick, more):
        """A copy on write may be asked for in a step that then does not run the sequence."""
        sequence = self.running[pick % len(self.running)]
        self.manager.allocate(sequence, sequence.num_computed_tokens + more)

    @rule()
    def step(self):
        self.memory.step()

    @precondition(lambda self: self.memory.under_way)
    @rule(pick=picks)
    def arrive(self, pick):
        transfer_id = list(self.memory.under_way)[pick % len(self.memory.under_way)]
        self.memory.arrive(transfer_id)
        sequence = self.restoring.pop(transfer_id)
        self.manager.arrive(sequence)
        assert sequence.host_table == []
        self.memory.check(sequence, self.window)
        self.running.append(sequence)
        self.happened["arrivals"] += 1

    @invariant()
    def recount(self):
        type(self).num_steps += 1
        sequences = [*self.running, *self.restoring.values(), *self.out]
        self.manager.check_integrity(sequences)
        for sequence in self.running:
            assert (
                sequence.num_writable_slots <= len(sequence.block_table) * self.manager.block_size
            )
            if self.window is None:
                assert NO_BLOCK not in sequence.block_table

    def teardown(self):
        """When all have gone, nothing is held, in either pool."""
        self.memory.step()
        for _ in list(self.restoring):
            self.arrive(0)
        for sequence in [*self.running, *self.out]:
            self.manager.free(sequence)
        self.manager.check_integrity([])
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_used_host_blocks == 0


@pytest.mark.parametrize(
    ("machine", "num_examples", "min_steps", "kinds"),
    [
        (PoolMachine, 100, 4_000, ("evicted", "revived")),
        (ManagerMachine, 200, 7_000, ("hits", "computed", "forks", "swaps", "arrivals")),
    ],
)
def test_every_random_history_keeps_the_promises(machine, num_examples, min_steps, kinds):
    machine.num_steps = 0
    machine.happened.clear()
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_examples, stateful_step_count=60)
    )
    assert machine.num_steps >= min_steps
    assert all(machine.happened[kind] >= 30 for kind in kinds), machine.happened
