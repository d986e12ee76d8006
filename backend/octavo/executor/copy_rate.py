"""How fast KV blocks go to the host and come back, measured once when a model is loaded.

Hence what a preemption costs. Knows nothing of what blocks hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.executor.block_transfers import BlockTransfers
from octavo.scheduler.preemption import PreemptionCosts

#: Enough bytes that their copy takes longer than its start, few enough to cost no load time.
_MOST_BYTES = 32 << 20
_NUM_ROUND_TRIPS = 3


@dataclass(frozen=True, slots=True)
class CopyRate:
    """A copy of n bytes takes `latency_s + n / bytes_per_s`."""

    bytes_per_s: float
    latency_s: float


def measure_costs(
    transfers: BlockTransfers, num_blocks: int, bytes_per_block: int, prefill_tokens_per_s: float
) -> PreemptionCosts:
    """Return the costs of preemption; with no blocks to copy, a copy takes for ever.

    See `measure_copy_rate`, and `PreemptionCosts` for the rate.
    """
    rate = CopyRate(bytes_per_s=math.inf, latency_s=math.inf)
    if num_blocks:
        rate = measure_copy_rate(transfers, num_blocks, bytes_per_block)
    return PreemptionCosts(bytes_per_block, rate.bytes_per_s, rate.latency_s, prefill_tokens_per_s)


def measure_copy_rate(
    transfers: BlockTransfers,
    num_blocks: int,
    bytes_per_block: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CopyRate:
    """Time round trips of one block and of many.

    Mutates up to `num_blocks` host blocks, the first ones; device blocks hold what they held.

    Args:
        transfers: nothing may be under way.
        num_blocks: blocks that both device and host have, at least 1.
        bytes_per_block: bytes of one.
        clock: seconds.
    """
    num_blocks = max(1, min(num_blocks, _MOST_BYTES // bytes_per_block))
    num_bytes = num_blocks * bytes_per_block
    bytes_per_s = 2 * num_bytes / _round_trip_s(transfers, num_blocks, clock)
    one_way_s = _round_trip_s(transfers, 1, clock) / 2
    return CopyRate(bytes_per_s, max(0.0, one_way_s - bytes_per_block / bytes_per_s))


def _round_trip_s(transfers: BlockTransfers, num_blocks: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest round trip; the first only warms memory up.

    The host's blocks follow each other and the device's go backwards, for a sequence's lie
    scattered; so too what scattered blocks need on their way is built before the model is ready.
    """
    there = tuple((num_blocks - 1 - place, place) for place in range(num_blocks))
    back = tuple((place, block) for block, place in there)
    swap_out, swap_in = BlockCopies(swap_out=there), BlockCopies(swap_in=(SwapIn(0, back),))
    times_s = []
    for _ in range(1 + _NUM_ROUND_TRIPS):
        started_s = clock()
        transfers.start(swap_out)
        transfers.start(swap_in)
        transfers.wait()
        times_s.append(clock() - started_s)
        transfers.arrived()
    return min(times_s[1:])
