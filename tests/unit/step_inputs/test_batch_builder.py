"""The incremental builder against a plain loop that starts afresh each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import NO_BLOCK

#: Slots of adapters, and of none.
SLOTS = (0, 1, 5, -1)


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
    pending: list[list[int]] = field(default_factory=list)
    adapted: dict[int, list[int]] = field(default_factory=dict)


def build_slowly(output: SchedulerOutput, block_size: int) -> Flat:
    flat = Flat()
    for item in output.scheduled:
        sequence = item.sequence
        end = sequence.num_computed_tokens + item.num_scheduled_tokens
        for position in range(sequence.num_computed_tokens, end):
            if position < sequence.num_named_tokens:
                flat.token_ids.append(sequence.token_ids[position])
            else:
                flat.pending.append([len(flat.token_ids), sequence.pending_row])
                flat.token_ids.append(0)
            if sequence.lora_slot >= 0:
                rows = flat.adapted.setdefault(sequence.lora_slot, [])
                rows.append(len(flat.positions))
            flat.positions.append(position)
            block = sequence.block_table[position // block_size]
            flat.slots.append(block * block_size + position % block_size)
        flat.starts.append(len(flat.token_ids))
        flat.seq_lens.append(end)
        flat.tables.append(sequence.block_table[: -(-end // block_size)])
        flat.logits_rows += [len(flat.token_ids) - 1] * len(item.draws)
    return flat


def check(inputs: BatchInputs, flat: Flat) -> None:
    attention = inputs.attention
    assert inputs.token_ids.tolist() == flat.token_ids
    assert inputs.pending.tolist() == flat.pending
    assert inputs.positions.tolist() == flat.positions
    assert inputs.logits_rows.tolist() == flat.logits_rows
    assert attention.slot_mapping.tolist() == flat.slots
    assert attention.query_start_loc.tolist() == flat.starts
    assert attention.seq_lens.tolist() == flat.seq_lens
    assert rows_by_slot(inputs) == flat.adapted
    tables = attention.block_tables.tolist()
    # What stands behind a sequence's own blocks is never read.
    assert [row[: len(own)] for row, own in zip(tables, flat.tables, strict=True)] == flat.tables
    assert attention.block_tables.shape == (len(flat.tables), max(map(len, flat.tables)))
    assert attention.max_seq_len == max(flat.seq_lens)
    assert attention.max_query_len == max(end - begin for begin, end in pairwise(flat.starts))


def rows_by_slot(inputs: BatchInputs) -> dict[int, list[int]]:
    if inputs.adapted is None:
        return {}
    rows, bounds = inputs.adapted.rows.tolist(), pairwise(inputs.adapted.starts.tolist())
    return {slot: rows[a:b] for slot, (a, b) in enumerate(bounds) if a < b}


def step_checked(driver, builder: BatchBuilder) -> list[tuple[str, int, int]]:
    """Check the inputs of the next step, then run it; where none can run, blocks come back."""
    output = driver.plan()
    if output.scheduled:
        check(builder.build(output), build_slowly(output, driver.cache.block_size))
    ran = driver.run(output)
    if not ran:
        driver.arrive()
    return ran


def make_builder(driver) -> BatchBuilder:
    limits = driver.scheduler.limits
    return BatchBuilder(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        driver.cache.block_size,
        num_adapter_slots=6,
    )


@settings(max_examples=150)
@given(data=st.data())
def test_random_runs_build_what_a_plain_loop_builds(draw_scheduler, play_at_random, data):
    driver = draw_scheduler(data)
    driver.steps_ahead = data.draw(st.sampled_from([0, 1]))
    builder = make_builder(driver)
    play_at_random(data, driver, SLOTS, lambda: step_checked(driver, builder))


def test_a_row_of_logits_is_repeated_for_each_sequence_that_draws_from_it(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5, n=3)
    driver.add("b", 2)
    inputs = make_builder(driver).build(driver.plan())
    assert inputs.logits_rows.tolist() == [4, 4, 4, 6]


def test_rows_of_logits_may_outnumber_the_seats(make_scheduler, make_sequence):
    sequences = [make_sequence("a", 3), make_sequence("b", 2)]
    shares = []
    for sequence, block in zip(sequences, (7, 5), strict=True):
        sequence.block_table = [block]
        draws = (sequence, *(sequence.fork(index) for index in range(1, 4)))
        shares.append(ScheduledSequence(sequence, sequence.num_tokens, draws))
    inputs = BatchBuilder(2, 8, 8, block_size=4).build(SchedulerOutput(tuple(shares)))
    assert inputs.logits_rows.tolist() == [2, 2, 2, 2, 4, 4, 4, 4]
    assert inputs.attention.slot_mapping.tolist() == [28, 29, 30, 20, 21]


def test_blocks_out_of_the_window_stand_in_the_table_as_they_are(make_sequence):
    builder = BatchBuilder(1, 8, 40, block_size=4)
    sequence = make_sequence("a", 14)
    sequence.num_computed_tokens = 13
    share = ScheduledSequence(sequence, 1, (sequence,))
    sequence.block_table = [3, 4, 5, 6]
    builder.build(SchedulerOutput((share,)))
    sequence.block_table = [NO_BLOCK, NO_BLOCK, 5, 6]
    inputs = builder.build(SchedulerOutput((share,)))
    assert inputs.attention.block_tables.tolist() == [[-1, -1, 5, 6]]
    assert inputs.attention.slot_mapping.tolist() == [25]


def test_a_copied_block_in_a_new_list_is_read_again(make_sequence):
    builder = BatchBuilder(1, 8, 40, block_size=4)
    sequence = make_sequence("a", 6)
    sequence.num_computed_tokens = 5
    share = ScheduledSequence(sequence, 1, (sequence,))
    for table, slot in (([3, 4], 17), ([3, 9], 37), ([3, 4], 17)):
        sequence.block_table = list(table)
        inputs = builder.build(SchedulerOutput((share,)))
        assert inputs.attention.block_tables.tolist() == [table]
        assert inputs.attention.slot_mapping.tolist() == [slot]


def test_slots_of_the_largest_blocks_are_exact(make_sequence):
    builder = BatchBuilder(1, 8, 256, block_size=256)
    sequence = make_sequence("a", 1)
    sequence.block_table = [2**31 - 1]
    share = ScheduledSequence(sequence, 1, (sequence,))
    inputs = builder.build(SchedulerOutput((share,)))
    assert inputs.attention.slot_mapping.tolist() == [(2**31 - 1) * 256]


def test_a_table_keeps_its_row_when_others_end(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=64)
    builder = make_builder(driver)
    driver.add("a", 9, max_tokens=2)
    driver.add("b", 30)
    assert step_checked(driver, builder) == [("a", 9, 1), ("b", 30, 1)]
    assert step_checked(driver, builder) == [("a", 1, 1), ("b", 1, 1)]
    assert step_checked(driver, builder) == [("b", 1, 1)]


def test_a_row_is_rebuilt_when_its_sequence_returns_with_other_blocks(make_scheduler):
    driver = make_scheduler()
    builder = make_builder(driver)
    first, second = driver.add("a", 9), driver.add("b", 9)
    step_checked(driver, builder)
    assert (first.block_table, second.block_table) == ([0, 1, 2], [3, 4, 5])
    for sequence in (second, first):
        driver.scheduler.preempt(sequence, driver.now_s)
    assert step_checked(driver, builder) == [("a", 10, 1), ("b", 10, 1)]
    assert step_checked(driver, builder) == [("a", 1, 1), ("b", 1, 1)]


def test_the_first_step_has_the_documented_types(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5)
    inputs = make_builder(driver).build(driver.plan())
    attention = inputs.attention
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


def test_rows_of_adapters_lie_behind_each_other_by_slot(make_scheduler):
    driver = make_scheduler()
    for name, slot in {"a": 1, "b": -1, "c": 0, "d": 1}.items():
        driver.add(name, 2).lora_slot = slot
    adapted = make_builder(driver).build(driver.plan()).adapted
    assert adapted.rows.tolist() == [4, 5, 0, 1, 6, 7]
    assert adapted.starts.tolist() == [0, 2, 6, 6, 6, 6, 6]


def test_a_step_without_adapters_has_no_adapted_rows(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 2)
    assert make_builder(driver).build(driver.plan()).adapted is None
