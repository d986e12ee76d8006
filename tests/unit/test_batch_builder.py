"""The incremental builder against a plain loop that starts afresh each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.request import FinishReason
from octavo.scheduler.output import SchedulerOutput


@dataclass
class Flat:
    """What a step's inputs must be, as lists."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


def build_slowly(output: SchedulerOutput, block_size: int) -> Flat:
    flat = Flat()
    for item in output.scheduled:
        sequence = item.sequence
        end = sequence.num_computed_tokens + item.num_scheduled_tokens
        for position in range(sequence.num_computed_tokens, end):
            flat.token_ids.append(sequence.token_ids[position])
            flat.positions.append(position)
            block = sequence.block_table[position // block_size]
            flat.slots.append(block * block_size + position % block_size)
        flat.starts.append(len(flat.token_ids))
        flat.seq_lens.append(end)
        flat.tables.append(sequence.block_table[: -(-end // block_size)])
        if item.samples:
            flat.logits_rows.append(len(flat.token_ids) - 1)
    return flat


def check(inputs: BatchInputs, flat: Flat) -> None:
    attention = inputs.attention
    assert inputs.token_ids.tolist() == flat.token_ids
    assert inputs.positions.tolist() == flat.positions
    assert inputs.logits_rows.tolist() == flat.logits_rows
    assert attention.slot_mapping.tolist() == flat.slots
    assert attention.query_start_loc.tolist() == flat.starts
    assert attention.seq_lens.tolist() == flat.seq_lens
    tables = attention.block_tables.tolist()
    # What stands behind a sequence's own blocks is never read.
    assert [row[: len(own)] for row, own in zip(tables, flat.tables, strict=True)] == flat.tables
    assert attention.block_tables.shape == (len(flat.tables), max(map(len, flat.tables)))
    assert attention.max_seq_len == max(flat.seq_lens)
    assert attention.max_query_len == max(end - begin for begin, end in pairwise(flat.starts))


def step_checked(driver, builder: BatchBuilder) -> list[tuple[str, int, bool]]:
    """Check the inputs of the next step, then run it."""
    output = driver.plan()
    check(builder.build(output), build_slowly(output, driver.cache.block_size))
    return driver.run(output)


def make_builder(driver) -> BatchBuilder:
    limits = driver.scheduler.limits
    return BatchBuilder(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        driver.cache.block_size,
    )


@settings(max_examples=150)
@given(data=st.data())
def test_random_runs_build_what_a_plain_loop_builds(make_scheduler, data):
    driver = make_scheduler(
        num_blocks=data.draw(st.integers(3, 16)),
        block_size=data.draw(st.sampled_from([1, 4, 16])),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(5, 20)),
        max_model_len=data.draw(st.integers(3, 40)),
    )
    builder = make_builder(driver)
    room = driver.scheduler.limits.max_model_len
    room = min(room, driver.cache.num_blocks * driver.cache.block_size)
    actions = st.lists(st.sampled_from("aassssxp"), min_size=10, max_size=40)
    for number, action in enumerate(data.draw(actions)):
        live = list(driver.scheduler.sequences())
        if action == "a":
            prompt = data.draw(st.integers(1, room - 1))
            driver.add(str(number), prompt, max_tokens=data.draw(st.integers(1, 12)))
        elif action == "x" and live:
            name = data.draw(st.sampled_from(live)).request_id
            driver.scheduler.finish(name, FinishReason.ABORT)
        elif action == "p" and driver.running:
            driver.scheduler.preempt(driver.scheduler.running[-1])
        elif live:
            step_checked(driver, builder)
    while driver.scheduler.has_unfinished:
        step_checked(driver, builder)


def test_a_row_is_rebuilt_when_another_sequence_takes_it(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=64)
    builder = make_builder(driver)
    driver.add("a", 9, max_tokens=2)
    driver.add("b", 30)
    assert step_checked(driver, builder) == [("a", 9, True), ("b", 30, True)]
    assert step_checked(driver, builder) == [("a", 1, True), ("b", 1, True)]
    assert step_checked(driver, builder) == [("b", 1, True)]


def test_a_row_is_rebuilt_when_its_sequence_returns_with_other_blocks(make_scheduler):
    driver = make_scheduler()
    builder = make_builder(driver)
    sequence = driver.add("a", 9)
    step_checked(driver, builder)
    assert sequence.block_table == [0, 1, 2]
    driver.scheduler.preempt(sequence)
    driver.cache.allocate(sequence, 1)
    assert sequence.block_table == [3]
    assert step_checked(driver, builder) == [("a", 10, True)]


def test_the_first_step_has_the_documented_types(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5)
    inputs = make_builder(driver).build(driver.plan())
    attention = inputs.attention
    assert inputs.to(torch.device("cpu")) is inputs
    for tensor in (inputs.token_ids, inputs.positions, inputs.logits_rows, attention.slot_mapping):
        assert tensor.dtype == torch.int64
    for tensor in (attention.query_start_loc, attention.seq_lens, attention.block_tables):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


@pytest.mark.parametrize("max_model_len", [8, 9])
def test_a_sequence_may_fill_the_whole_context(make_scheduler, max_model_len):
    driver = make_scheduler(max_model_len=max_model_len)
    builder = make_builder(driver)
    sequence = driver.add("a", 5)
    while driver.scheduler.has_unfinished:
        step_checked(driver, builder)
    assert sequence.num_tokens == max_model_len
