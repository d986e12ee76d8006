"""A runner makes a step's copies before its forward pass, and knows what they cost."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.cache.block_copies import SwapIn
from octavo.executor.model_runner import widest_window
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence


def make_sequence(name: str, num_tokens: int, *blocks: int) -> Sequence:
    """Make a sequence in the given blocks of 8 tokens; its tokens depend on its name."""
    token_ids = tuple((ord(name) * 7 + 5 * index) % 97 for index in range(num_tokens))
    sequence = Sequence(Request(name, token_ids, SamplingParams()))
    sequence.block_table = list(blocks)
    return sequence


def go_on(sequence: Sequence, token_id: int, *blocks: int) -> Sequence:
    """Let a sequence have computed all it knows, draw a token, and have these blocks."""
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.append_token(token_id)
    sequence.block_table = list(blocks)
    return sequence


@pytest.fixture(scope="module")
def runner(make_runner):
    return make_runner()


@pytest.fixture
def undisturbed(runner, make_step) -> torch.Tensor:
    """Logits of sequence `a` after 13 tokens and another, computed without any copy."""
    sequence = make_sequence("a", 13, 0, 1)
    runner.execute(make_step(sequence))
    return runner.execute(make_step(go_on(sequence, 42, 0, 1))).clone()


def test_logits_lie_in_memory_that_steps_share(runner, make_step):
    small, large = make_sequence("a", 3, 0), [make_sequence(name, 3, 0) for name in "abcd"]
    first = runner.execute(make_step(*large))
    assert runner.execute(make_step(small)).data_ptr() == first.data_ptr()


def test_a_swapped_sequence_goes_on_with_the_same_bits(runner, make_step, undisturbed):
    first = make_sequence("a", 13, 0, 1)
    runner.execute(make_step(first))
    # Its blocks are taken over in the same step in which they leave.
    other = make_sequence("b", 16, 0, 1)
    runner.execute(make_step(other, swap_out=((0, 3), (1, 5))))
    runner.execute(make_step(swap_in=(SwapIn(7, ((3, 6), (5, 2))),)))
    assert runner.arrived() == (7,)
    assert torch.equal(runner.execute(make_step(go_on(first, 42, 6, 2))), undisturbed)


def test_a_block_is_copied_before_it_is_written(runner, make_step, undisturbed):
    parent = make_sequence("a", 13, 0, 1)
    runner.execute(make_step(parent))
    fork = go_on(parent.fork(1), 5, 0, 4)
    step = make_step(go_on(parent, 42, 0, 1), fork, copies=((1, 4),))
    both = runner.execute(step).clone()
    assert torch.equal(both[:1], undisturbed)
    alone = make_sequence("a", 13, 0, 1)
    runner.execute(make_step(alone))
    assert torch.equal(both[1:], runner.execute(make_step(go_on(alone, 5, 0, 1))))


def test_a_block_that_leaves_and_comes_back_in_one_step_is_whole(runner, make_step, undisturbed):
    first = make_sequence("a", 13, 0, 1)
    runner.execute(make_step(first))
    swap_in = SwapIn(1, ((2, 3), (6, 4)))
    runner.execute(make_step(swap_out=((0, 2), (1, 6)), swap_in=(swap_in,)))
    assert runner.arrived() == (1,)
    assert torch.equal(runner.execute(make_step(go_on(first, 42, 3, 4))), undisturbed)


def test_nothing_scheduled_gives_no_logits_and_returns_at_once(runner, make_step):
    assert runner.execute(make_step()).shape == (0, 97)
    assert runner.arrived() == ()


class LateTransfers:
    """Makes delayed transfers and keeps them within reach."""

    def __init__(self, make_delayed) -> None:
        self._make_delayed = make_delayed

    def __call__(self, attention, device, host):
        self.made = self._make_delayed(attention, device, host)
        return self.made


@pytest.fixture(scope="module")
def late(delayed_transfers) -> LateTransfers:
    return LateTransfers(delayed_transfers)


@pytest.fixture(scope="module")
def late_runner(make_runner, late):
    return make_runner(make_transfers=late)


def test_a_step_without_sequences_waits_until_blocks_have_come_back(
    late_runner, late, make_step, undisturbed
):
    late.made.num_polls = 50
    first = make_sequence("a", 13, 0, 1)
    late_runner.execute(make_step(first))
    late_runner.execute(make_step(make_sequence("b", 3, 0), swap_out=((0, 3), (1, 5))))
    late_runner.execute(make_step(make_sequence("b", 3, 0), swap_in=(SwapIn(2, ((3, 6), (5, 2))),)))
    assert late_runner.arrived() == ()
    assert late_runner.execute(make_step()).shape == (0, 97)
    assert late_runner.arrived() == (2,)
    assert torch.equal(late_runner.execute(make_step(go_on(first, 42, 6, 2))), undisturbed)


def test_blocks_read_before_they_have_come_back_spoil_the_result(late_runner, late, make_step):
    """So that a delayed swap-in proves, wherever it is used, that nobody reads too early."""
    late.made.num_polls = 1
    first = make_sequence("a", 13, 0, 1)
    late_runner.execute(make_step(first))
    late_runner.execute(make_step(swap_out=((0, 3), (1, 5))))
    early = make_step(go_on(first, 42, 6, 2), swap_in=(SwapIn(2, ((3, 6), (5, 2))),))
    assert late_runner.execute(early).isnan().all()


def test_costs_are_measured_at_load(runner, bytes_per_block):
    costs = runner.costs
    assert costs.bytes_per_block == bytes_per_block
    assert 0 < costs.copy_bytes_per_s < math.inf
    assert 0 <= costs.copy_latency_s < 1
    assert 0 < costs.prefill_tokens_per_s < math.inf


def test_host_blocks_are_those_of_the_swap_space(runner):
    assert runner.num_host_blocks == 8


def test_without_swap_space_no_swap_is_ever_cheaper(make_runner, make_step):
    runner = make_runner(swap_space_bytes=0)
    assert runner.num_host_blocks == 0
    assert not runner.costs.prefers_swap(1, 10**9)
    assert runner.execute(make_step(make_sequence("a", 13, 0, 1))).shape == (1, 97)


def test_one_block_on_either_side_is_enough_to_measure(make_runner, bytes_per_block):
    runner = make_runner(num_kv_blocks=1, swap_space_bytes=bytes_per_block)
    assert (runner.num_blocks, runner.num_host_blocks) == (1, 1)
    assert 0 < runner.costs.copy_bytes_per_s < math.inf


def test_the_window_is_told_where_every_layer_has_one(runner, make_runner):
    assert runner.window is None
    assert make_runner("mistral").window == 20


@pytest.mark.parametrize(
    ("windows", "widest"), [((8, 32, 16), 32), ((8, None, 16), None), ((None,), None), ((4,), 4)]
)
def test_the_widest_window_counts_and_none_is_wider_than_all(windows, widest):
    assert widest_window(windows) == widest
