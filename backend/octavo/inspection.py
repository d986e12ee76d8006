"""What an engine's queues and KV blocks look like between two steps, for `octavo inspect`.

Made when somebody asks, and only then: nothing is collected beforehand. Holds no prompt text and no
token ids; hashes of blocks are cut short. Knows nothing of the engine, the server or of how it is
drawn.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.cache.block_hash import chain_hash
from octavo.cache.block_pool import BlockPool
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import NO_BLOCK, Sequence, SequenceStatus

#: Bytes of a block's hash that are shown, as twice as many hex digits.
_SHOWN_HASH_BYTES = 6


class BlockState(enum.StrEnum):
    """What a block is to its pool; the value is the letter that stands for it."""

    FREE = "."
    """Nobody owns it and nothing can be reused from it."""
    CACHED = "c"
    """Nobody owns it, but its content is found by its hash until the block is taken."""
    USED = "u"
    """One sequence owns it."""
    SHARED = "s"
    """Several sequences own it."""


@dataclass(frozen=True, slots=True)
class InspectedPool:
    """The blocks of one pool, device or host, by block id."""

    states: str
    """One letter of `BlockState` a block."""
    hashes: Mapping[int, str]
    """First hex digits of the hash of each block that can be found by it."""
    num_owners: Mapping[int, int]
    """How many sequences own each shared block."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of blocks in each state, by the state's name in lower case."""
        return {state.name.lower(): self.states.count(state) for state in BlockState}


@dataclass(frozen=True, slots=True)
class InspectedSequence:
    """One live sequence; where a name is the engine's own, see `octavo.sequence.Sequence`."""

    request_id: str
    """The engine's name for the request."""
    index: int
    status: str
    lora_name: str | None
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    block_table: tuple[int, ...]
    """Device blocks in order; -1 where no token sees the block any more."""
    host_table: tuple[int, ...]
    """Host blocks in order, while swapped or restoring."""
    age_s: float
    """Seconds since its request arrived."""
    waiting_s: float | None
    """Seconds since it last began to wait; None while it runs."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A whole engine's view; picklable."""

    block_size: int
    """Tokens in one block."""
    device: InspectedPool
    host: InspectedPool
    sequences: tuple[InspectedSequence, ...]
    """Running, then restoring, then waiting ones, each in the order in which they are served."""
    num_allocated_slots: int
    """Slots of all device blocks that sequences own; a shared block counts once."""
    num_used_slots: int
    """Those of them that hold the KV of a token."""
    num_query_tokens: int
    """Prompt tokens that were looked up in the prefix cache since the engine started."""
    num_hit_tokens: int
    """Those of them that were found."""
    num_swap_preemptions: int
    """Preemptions since the engine started that moved KV to the host."""
    num_recompute_preemptions: int
    """Preemptions since the engine started that dropped KV."""

    def to_json(self) -> str:
        """Return it as a JSON object, whose keys are the names here."""
        pools = {"device": self.device, "host": self.host}
        members = _members(self)
        members |= {name: _members(pool) | {"counts": pool.counts} for name, pool in pools.items()}
        members["sequences"] = [_members(sequence) for sequence in self.sequences]
        return json.dumps(members)


def inspect_scheduler(scheduler: Scheduler, now_s: float) -> Inspection:
    """Look at a scheduler and its cache between two steps.

    Reads every block and every live sequence once, and changes nothing.
    """
    cache, live = scheduler.cache, tuple(scheduler.sequences())
    device = _inspect_pool(cache.device_pool)
    counts = device.counts
    return Inspection(
        block_size=cache.block_size,
        device=device,
        host=_inspect_pool(cache.host_pool),
        sequences=tuple(_inspect_sequence(sequence, now_s) for sequence in live),
        num_allocated_slots=(counts["used"] + counts["shared"]) * cache.block_size,
        num_used_slots=_count_used_slots(live, cache.block_size),
        num_query_tokens=cache.num_query_tokens,
        num_hit_tokens=cache.num_hit_tokens,
        num_swap_preemptions=scheduler.num_swap_preemptions,
        num_recompute_preemptions=scheduler.num_recompute_preemptions,
    )


def _inspect_pool(pool: BlockPool) -> InspectedPool:
    states: list[str] = []
    hashes: dict[int, str] = {}
    num_owners: dict[int, int] = {}
    for block in range(pool.num_blocks):
        owners, key = pool.ref_count(block), pool.key_of(block)
        if key is not None:
            hashes[block] = chain_hash(key)[:_SHOWN_HASH_BYTES].hex()
        if owners > 1:
            num_owners[block] = owners
        states.append(_state_of(owners, key is not None))
    return InspectedPool("".join(states), hashes, num_owners)


def _state_of(num_owners: int, is_published: bool) -> BlockState:
    if num_owners:
        return BlockState.USED if num_owners == 1 else BlockState.SHARED
    return BlockState.CACHED if is_published else BlockState.FREE


def _inspect_sequence(sequence: Sequence, now_s: float) -> InspectedSequence:
    request = sequence.request
    is_running = sequence.status is SequenceStatus.RUNNING
    return InspectedSequence(
        request_id=request.request_id,
        index=sequence.index,
        status=sequence.status.value,
        lora_name=request.params.lora_name,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        block_table=tuple(sequence.block_table),
        host_table=tuple(sequence.host_table),
        age_s=_seconds_since(request.arrival_s, now_s),
        waiting_s=None if is_running else _seconds_since(sequence.clock.since_s, now_s),
    )


def _members(item: InspectedPool | InspectedSequence | Inspection) -> dict[str, Any]:
    # dataclasses.asdict would copy every block id and hash.
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _seconds_since(since_s: float, now_s: float) -> float:
    # A request's clock may have been read a little later than this one.
    return round(max(0.0, now_s - since_s), 3)


def _count_used_slots(sequences: Iterable[Sequence], block_size: int) -> int:
    """Count the slots that hold computed KV, in a shared block those of who uses most of it."""
    used: dict[int, int] = {}
    for sequence in sequences:
        for place, block in enumerate(sequence.block_table):
            in_block = sequence.num_computed_tokens - place * block_size
            used[block] = max(used.get(block, 0), min(max(in_block, 0), block_size))
    used.pop(NO_BLOCK, None)
    return sum(used.values())
