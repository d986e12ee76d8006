"""Exact plans of small scenarios.

A plan reads (name, tokens, draws a token), and a block holds 4 tokens.
"""

from __future__ import annotations

import pytest

from octavo.request import FinishReason, TokenOutput
from octavo.sequence import SequenceStatus


def test_a_prompt_is_computed_whole_and_then_a_token_a_step(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5, max_tokens=3)
    assert driver.scheduler.has_unfinished
    assert driver.step(31) == [("a", 5, True)]
    assert driver.outputs == [TokenOutput("a", (31,))]
    assert driver.step(32) == [("a", 1, True)]
    assert driver.step(33) == [("a", 1, True)]
    assert driver.outputs == [TokenOutput("a", (33,), (), FinishReason.LENGTH)]
    assert not driver.scheduler.has_unfinished
    assert driver.cache.num_free_blocks == 100
    assert driver.step() == []


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_draws(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 20)
    assert driver.step() == [("a", 8, False)]
    assert driver.outputs == []
    assert driver.step() == [("a", 8, False)]
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (16, 20)
    assert driver.step() == [("a", 4, True)]
    assert driver.step() == [("a", 1, True)]


def test_a_prompt_of_exactly_the_budget_is_one_chunk(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 8)
    assert driver.step() == [("a", 8, True)]


def test_blocks_are_allocated_chunk_by_chunk(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 17)
    tables = []
    for _ in range(3):
        driver.step()
        tables.append(sequence.block_table.copy())
    assert tables == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_decodes_go_first_and_a_chunk_takes_the_rest_of_the_budget(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 5)
    assert driver.step() == [("a", 5, True)]
    driver.add("b", 12)
    assert driver.step() == [("a", 1, True), ("b", 7, False)]
    assert driver.step() == [("a", 1, True), ("b", 5, True)]
    assert driver.step() == [("a", 1, True), ("b", 1, True)]


def test_prompts_share_one_budget_in_order_of_arrival(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=16)
    for name in "abcd":
        driver.add(name, 6)
    assert driver.step() == [("a", 6, True), ("b", 6, True), ("c", 4, False)]
    assert driver.waiting == ["d"]
    assert driver.step() == [("a", 1, True), ("b", 1, True), ("c", 2, True), ("d", 6, True)]


def test_drawing_rows_are_those_that_complete_their_known_tokens(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=10)
    for name in "abc":
        driver.add(name, 4)
    output = driver.plan()
    assert [sequence.request_id for sequence in output.sampling] == ["a", "b"]
    assert output.num_scheduled_tokens == 10
    assert output.preempted == ()


def test_at_most_max_num_seqs_run_and_a_freed_place_is_filled_next_step(make_scheduler):
    driver = make_scheduler(max_num_seqs=2)
    driver.add("a", 5, max_tokens=1)
    driver.add("b", 5)
    driver.add("c", 5)
    assert driver.step() == [("a", 5, True), ("b", 5, True)]
    assert driver.step() == [("b", 1, True), ("c", 5, True)]


def test_admission_needs_room_for_the_prompt_and_one_token(make_scheduler):
    driver = make_scheduler(num_blocks=4)
    driver.add("a", 7)
    driver.add("b", 8)
    assert driver.step() == [("a", 7, True)]
    assert (driver.running, driver.waiting) == (["a"], ["b"])

    driver = make_scheduler(num_blocks=4)
    driver.add("a", 7)
    driver.add("b", 7)
    assert driver.step() == [("a", 7, True), ("b", 7, True)]


def test_nobody_overtakes_the_head_of_the_queue(make_scheduler):
    driver = make_scheduler(num_blocks=4)
    driver.add("a", 7, max_tokens=2)
    driver.add("b", 8)
    driver.add("c", 1)
    assert driver.step() == [("a", 7, True)]
    assert driver.step() == [("a", 1, True)]
    assert driver.waiting == ["b", "c"]
    assert driver.step() == [("b", 8, True), ("c", 1, True)]


@pytest.fixture
def tight(make_scheduler):
    """Two sequences of 7 tokens that fill all 4 blocks, two steps before the first needs more."""
    driver = make_scheduler(num_blocks=4)
    a, b = driver.add("a", 7, max_tokens=5), driver.add("b", 7)
    assert driver.step(31, 41) == [("a", 7, True), ("b", 7, True)]
    assert driver.step(32, 42) == [("a", 1, True), ("b", 1, True)]
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3])
    return driver, a, b


def test_the_last_running_makes_room_keeps_its_tokens_and_drops_its_kv(tight):
    driver, a, b = tight
    assert driver.step(33) == [("a", 1, True)]
    assert driver.preempted == ["b"]
    assert b.token_ids == [*range(10, 17), 41, 42]
    assert (b.num_computed_tokens, b.block_table) == (0, [])
    assert b.status is SequenceStatus.WAITING
    assert (driver.running, driver.waiting) == (["a"], ["b"])
    assert a.block_table == [0, 1, 3]
    assert driver.scheduler.num_preemptions == 1


def test_a_preempted_sequence_waits_until_it_fits_and_recomputes_all_it_knows(tight):
    driver, a, b = tight
    assert driver.step(33) == [("a", 1, True)]
    assert driver.step(34) == [("a", 1, True)]
    assert driver.step(35) == [("a", 1, True)]
    assert a.finish_reason is FinishReason.LENGTH
    assert driver.step(43) == [("b", 9, True)]
    assert driver.outputs == [TokenOutput("b", (43,))]
    assert b.num_output_tokens == 3
    assert driver.step(44) == [("b", 1, True)]


def test_a_preempted_sequence_stays_ahead_of_later_arrivals(tight):
    driver, _, _ = tight
    driver.add("c", 1)
    assert driver.step() == [("a", 1, True)]
    assert driver.waiting == ["b", "c"]
    assert driver.cache.num_free_blocks == 1


def test_the_last_running_preempts_itself_when_it_is_the_one_that_grows(make_scheduler):
    driver = make_scheduler(num_blocks=4)
    driver.add("a", 5)
    driver.add("b", 7)
    assert driver.step() == [("a", 5, True), ("b", 7, True)]
    assert driver.step() == [("a", 1, True), ("b", 1, True)]
    assert driver.step() == [("a", 1, True)]
    assert driver.preempted == ["b"]


def test_as_many_make_room_in_one_step_as_must_last_first(make_scheduler):
    driver = make_scheduler(num_blocks=8)
    for name in "abcd":
        driver.add(name, 7)
    driver.step()
    driver.step()
    assert driver.step() == [("a", 1, True), ("b", 1, True)]
    assert driver.preempted == ["d", "c"]
    assert (driver.running, driver.waiting) == (["a", "b"], ["c", "d"])


def test_a_recomputation_is_chunked_like_a_prompt(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 8)
    driver.step(31)
    driver.step(32)
    driver.scheduler.preempt(sequence)
    assert driver.step() == [("a", 8, False)]
    assert driver.step(33) == [("a", 2, True)]
    assert sequence.token_ids == [*range(10, 18), 31, 32, 33]


def test_a_half_computed_prompt_makes_room_too(make_scheduler):
    driver = make_scheduler(num_blocks=4, max_num_batched_tokens=12)
    for name, prompt in (("a", 4), ("b", 4), ("c", 7)):
        driver.add(name, prompt)
    assert driver.step() == [("a", 4, True), ("b", 4, True), ("c", 4, False)]
    (half,) = driver.scheduler.running[2:]
    assert half.num_computed_tokens == 4
    assert driver.step() == [("a", 1, True), ("b", 1, True)]
    assert driver.preempted == ["c"]
    assert (half.num_computed_tokens, half.block_table) == (0, [])


def test_finish_of_a_preempted_sequence(tight):
    driver, _, b = tight
    driver.step()
    assert driver.scheduler.finish("b", FinishReason.ABORT) is b
    assert driver.waiting == []
    assert driver.step() == [("a", 1, True)]


def test_a_pool_for_one_and_a_half_requests_serves_them_all_without_thrashing(make_scheduler):
    driver = make_scheduler(num_blocks=15)
    names = list("abcdef")
    for name in names:
        driver.add(name, 10, max_tokens=30)
    finished = []
    num_steps = num_computed = 0
    while driver.scheduler.has_unfinished:
        num_computed += sum(count for _, count, _ in driver.step())
        num_steps += 1
        finished += [output.request_id for output in driver.outputs if output.finish_reason]
    assert finished == names
    assert driver.scheduler.num_preemptions <= 2 * len(names)
    assert num_computed <= 2 * len(names) * (10 + 30 - 1)
    assert num_steps < len(names) * 30
    assert driver.cache.num_free_blocks == 15
