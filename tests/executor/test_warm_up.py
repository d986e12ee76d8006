"""Before a model is ready, steps take every way that later ones can take."""

from __future__ import annotations

import pytest
import torch

from octavo.executor.device_inputs import StepSizes
from octavo.executor.warm_up import WarmUpSteps, sample_every_way


def shares(step) -> list[tuple[int, int]]:
    return [(each.sequence.num_computed_tokens, each[1]) for each in step.scheduled]


def test_the_largest_step_has_all_tokens_and_all_rows():
    step = WarmUpSteps(StepSizes(6, 40, 1000, 8)).largest()
    assert shares(step) == [(0, 7), (0, 7), (0, 7), (0, 7), (0, 6), (0, 6)]
    assert len(step.sampling) == 6


def test_no_step_is_longer_than_a_sequence_may_be():
    steps = WarmUpSteps(StepSizes(2, 4000, 50, 16))
    assert shares(steps.largest()) == [(0, 50), (0, 50)]
    assert steps.max_prefill == 50


def test_prompts_take_each_kernel_that_products_have_for_few_tokens():
    def lens(max_num_tokens: int) -> list[list[tuple[int, int]]]:
        return [
            shares(step) for step in WarmUpSteps(StepSizes(3, max_num_tokens, 4096, 16)).prompts()
        ]

    assert lens(512) == [[(0, 64)], [(0, 128)]]
    assert lens(100) == [[(0, 64)]]
    assert lens(64) == []


def test_sequences_decode_with_short_and_long_contexts_alone_and_together():
    steps = WarmUpSteps(StepSizes(3, 512, 4096, 16))
    assert [shares(step) for step in steps.decodes()] == [
        [(0, 1)],
        [(2047, 1)],
        [(0, 1)] * 3,
    ]


def test_the_largest_step_is_also_run_with_adapters_if_there_are_any():
    (step,) = WarmUpSteps(StepSizes(5, 40, 1000, 8, num_adapter_slots=2)).adapted()
    assert shares(step) == [(0, 8)] * 5
    assert [each.sequence.lora_slot for each in step.scheduled] == [0, 1, 0, 1, 0]
    assert list(WarmUpSteps(StepSizes(5, 40, 1000, 8)).adapted()) == []


@pytest.mark.parametrize(
    "sizes",
    [StepSizes(1, 1, 1, 8), StepSizes(3, 5, 1, 8), StepSizes(4, 512, 100, 16)],
)
def test_every_step_keeps_to_the_blocks_of_the_small_cache_and_to_the_largest_step(sizes):
    steps = WarmUpSteps(sizes)
    every = [steps.largest(), steps.prefill(steps.min_prefill), steps.prefill(steps.max_prefill)]
    for step in (*every, *steps.prompts(), *steps.decodes()):
        assert step.num_scheduled_tokens <= sizes.max_num_tokens
        for sequence, count, _ in step.scheduled:
            assert sequence.num_computed_tokens + count == sequence.num_tokens
            assert sequence.num_tokens <= sizes.max_model_len
            assert len(sequence.block_table) <= sizes.max_blocks
            assert set(sequence.block_table) <= set(range(steps.num_blocks))


def test_sampling_is_tried_for_one_row_and_for_many():
    for num_rows in (1, 5):
        sample_every_way(torch.randn(num_rows, 331))
