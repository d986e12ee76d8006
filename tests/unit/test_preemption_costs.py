"""The choice between swap and recomputation follows the documented formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from octavo.scheduler.preemption import PreemptionCosts

#: Both ways of a block take 1 ms, an operation each way 2 ms, a token 0.5 ms.
COSTS = PreemptionCosts(
    bytes_per_block=1_000_000,
    copy_bytes_per_s=2e9,
    copy_latency_s=0.002,
    prefill_tokens_per_s=2000.0,
)


def test_a_swap_costs_two_operations_and_its_bytes_out_and_back():
    assert COSTS.swap_s(10) == pytest.approx(2 * 0.002 + 2 * 10 * 0.0005)


def test_recomputation_costs_its_tokens():
    assert COSTS.recompute_s(160) == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "swaps"),
    [
        (1, 9, False),  # 5 ms against 4.5 ms: the latency decides
        (1, 11, True),  # 5 ms against 5.5 ms
        (100, 1600, True),  # 104 ms against 800 ms
        (100, 200, False),  # 104 ms against 100 ms: most tokens are shared or in the cache
    ],
)
def test_the_cheaper_one_is_preferred(num_blocks, num_tokens, swaps):
    assert COSTS.prefers_swap(num_blocks, num_tokens) is swaps


def test_equal_costs_prefer_recomputation():
    costs = replace(COSTS, copy_bytes_per_s=1e6, copy_latency_s=0.0, prefill_tokens_per_s=8.0)
    assert costs.swap_s(1) == costs.recompute_s(16) == 2.0
    assert not costs.prefers_swap(1, 16)


def test_without_host_memory_nothing_is_swapped():
    costs = replace(COSTS, copy_latency_s=math.inf)
    assert not costs.prefers_swap(1, 10**9)


def test_slower_copies_move_the_switch_to_fewer_blocks_for_the_same_tokens():
    slower = replace(COSTS, copy_bytes_per_s=COSTS.copy_bytes_per_s / 100)
    most = [max(n for n in range(2000) if costs.prefers_swap(n, 1000)) for costs in (COSTS, slower)]
    assert most == [495, 4]
