"""Exact plans of small scenarios.

A plan reads (name, tokens, how many draw a token), and a block holds 4 tokens. Of the blocks, 1 %
but at least one is kept from newcomers while anybody runs.
"""

from __future__ import annotations

import pytest

from octavo.request import FinishReason, TokenOutput
from octavo.sequence import SequenceStatus


def test_a_prompt_is_computed_whole_and_then_a_token_a_step(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5, max_tokens=3)
    assert driver.scheduler.has_unfinished
    assert driver.step(31) == [("a", 5, 1)]
    assert driver.outputs == [TokenOutput("a", (31,))]
    assert driver.step(32) == [("a", 1, 1)]
    assert driver.step(33) == [("a", 1, 1)]
    assert driver.outputs == [TokenOutput("a", (33,), (), FinishReason.LENGTH)]
    assert not driver.scheduler.has_unfinished
    assert driver.cache.num_free_blocks == 100
    assert driver.step() == []


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_draws(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 20)
    assert driver.step() == [("a", 8, 0)]
    assert driver.outputs == []
    assert driver.step() == [("a", 8, 0)]
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (16, 20)
    assert driver.step() == [("a", 4, 1)]
    assert driver.step() == [("a", 1, 1)]


def test_a_prompt_of_exactly_the_budget_is_one_chunk(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 8)
    assert driver.step() == [("a", 8, 1)]


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
    assert driver.step() == [("a", 5, 1)]
    driver.add("b", 12)
    assert driver.step() == [("a", 1, 1), ("b", 7, 0)]
    assert driver.step() == [("a", 1, 1), ("b", 5, 1)]
    assert driver.step() == [("a", 1, 1), ("b", 1, 1)]


def test_prompts_share_one_budget_in_order_of_arrival(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=16)
    for name in "abcd":
        driver.add(name, 6)
    assert driver.step() == [("a", 6, 1), ("b", 6, 1), ("c", 4, 0)]
    assert driver.waiting == ["d"]
    assert driver.step() == [("a", 1, 1), ("b", 1, 1), ("c", 2, 1), ("d", 6, 1)]


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
    assert driver.step() == [("a", 5, 1), ("b", 5, 1)]
    assert driver.step() == [("b", 1, 1), ("c", 5, 1)]


def test_admission_needs_room_for_the_prompt_one_token_and_a_reserve(make_scheduler):
    driver = make_scheduler(num_blocks=5)
    driver.add("a", 7)
    driver.add("b", 8)
    assert driver.step() == [("a", 7, 1)]
    assert (driver.running, driver.waiting) == (["a"], ["b"])

    driver = make_scheduler(num_blocks=5)
    driver.add("a", 7)
    driver.add("b", 7)
    assert driver.step() == [("a", 7, 1), ("b", 7, 1)]


def test_the_reserve_does_not_keep_out_one_that_would_run_alone(make_scheduler):
    driver = make_scheduler(num_blocks=2)
    driver.add("a", 7)
    assert driver.step() == [("a", 7, 1)]


def test_two_prompts_that_would_fill_the_pool_half_computed_both_finish(make_scheduler):
    driver = make_scheduler(num_blocks=8, max_num_batched_tokens=8)
    driver.add("a", 20, max_tokens=2)
    driver.add("b", 20, max_tokens=2)
    plans = [driver.step() for _ in range(4)]
    assert plans == [[("a", 8, 0)], [("a", 8, 0)], [("a", 4, 1)], [("a", 1, 1)]]
    plans = [driver.step() for _ in range(4)]
    assert plans == [[("b", 8, 0)], [("b", 8, 0)], [("b", 4, 1)], [("b", 1, 1)]]
    assert driver.scheduler.num_preemptions == 0


def test_admission_leaves_prompts_that_run_the_blocks_they_still_need(make_scheduler):
    driver = make_scheduler(num_blocks=9, max_num_batched_tokens=8)
    driver.add("a", 20, max_tokens=2)
    driver.step()
    driver.add("b", 7, max_tokens=2)
    driver.add("c", 4, max_tokens=2)
    plans = [driver.step() for _ in range(3)]
    assert plans == [[("a", 8, 0)], [("a", 4, 1), ("b", 4, 0)], [("a", 1, 1), ("b", 3, 1)]]
    assert driver.waiting == ["c"]


def test_admission_causes_no_preemption_in_the_next_step(make_scheduler):
    driver = make_scheduler(num_blocks=12, max_num_batched_tokens=64)
    for name in "abcdef":
        driver.add(name, 7)
    driver.step()
    assert driver.running == list("abcde")
    driver.step()
    assert driver.preempted == []


def test_nobody_overtakes_the_head_of_the_queue(make_scheduler):
    driver = make_scheduler(num_blocks=5)
    driver.add("a", 7, max_tokens=2)
    driver.add("b", 8)
    driver.add("c", 1)
    assert driver.step() == [("a", 7, 1)]
    assert driver.step() == [("a", 1, 1)]
    assert driver.waiting == ["b", "c"]
    assert driver.step() == [("b", 8, 1), ("c", 1, 1)]


@pytest.fixture
def tight(make_scheduler):
    """Two sequences that fill all 5 blocks; in the next step the first needs one more."""
    driver = make_scheduler(num_blocks=5)
    a, b = driver.add("a", 6, max_tokens=6), driver.add("b", 7)
    assert driver.step(31, 41) == [("a", 6, 1), ("b", 7, 1)]
    assert driver.step(32, 42) == [("a", 1, 1), ("b", 1, 1)]
    assert driver.step(33, 43) == [("a", 1, 1), ("b", 1, 1)]
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3, 4])
    return driver, a, b


def test_the_last_running_makes_room_keeps_its_tokens_and_drops_its_kv(tight):
    driver, a, b = tight
    assert driver.step(34) == [("a", 1, 1)]
    assert driver.preempted == ["b"]
    assert b.token_ids == [*range(10, 17), 41, 42, 43]
    assert (b.num_computed_tokens, b.block_table) == (0, [])
    assert b.status is SequenceStatus.WAITING
    assert (driver.running, driver.waiting) == (["a"], ["b"])
    assert a.block_table == [0, 1, 2]
    assert driver.scheduler.num_preemptions == b.num_preemptions == 1


def test_a_preempted_sequence_waits_until_it_fits_and_recomputes_all_it_knows(tight):
    driver, a, b = tight
    assert driver.step(34) == [("a", 1, 1)]
    assert driver.step(35) == [("a", 1, 1)]
    assert driver.step(36) == [("a", 1, 1)]
    assert a.finish_reason is FinishReason.LENGTH
    assert driver.step(44) == [("b", 10, 1)]
    assert driver.outputs == [TokenOutput("b", (44,))]
    assert b.num_output_tokens == 4
    assert driver.step(45) == [("b", 1, 1)]


def test_a_preempted_sequence_stays_ahead_of_later_arrivals(tight):
    driver, _, _ = tight
    driver.add("c", 1)
    assert driver.step() == [("a", 1, 1)]
    assert driver.waiting == ["b", "c"]
    assert driver.cache.num_free_blocks == 2


def test_the_last_running_preempts_itself_when_it_is_the_one_that_grows(make_scheduler):
    driver = make_scheduler(num_blocks=5)
    driver.add("a", 7)
    driver.add("b", 7)
    driver.steps(2)
    assert driver.step() == [("a", 1, 1)]
    assert driver.preempted == ["b"]


def test_as_many_make_room_in_one_step_as_must_last_first(make_scheduler):
    driver = make_scheduler(num_blocks=11, max_num_batched_tokens=64)
    for name in "abcde":
        driver.add(name, 7)
    driver.steps(2)
    assert driver.running == list("abcde")
    assert driver.step() == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]
    assert driver.preempted == ["e", "d"]
    assert (driver.running, driver.waiting) == (list("abc"), ["d", "e"])


def test_a_recomputation_is_chunked_like_a_prompt(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 8)
    driver.step(31)
    driver.step(32)
    driver.scheduler.preempt(sequence, driver.now_s)
    assert driver.step() == [("a", 8, 0)]
    assert driver.step(33) == [("a", 2, 1)]
    assert sequence.token_ids == [*range(10, 18), 31, 32, 33]


def test_a_half_computed_prompt_makes_room_too(make_scheduler):
    driver = make_scheduler(num_blocks=11, max_num_batched_tokens=4)
    driver.add("a", 3)
    half = driver.add("b", 32)
    driver.steps(10)
    assert half.num_computed_tokens == 28
    assert driver.step() == [("a", 1, 1)]
    assert driver.preempted == ["b"]
    assert (half.num_computed_tokens, half.block_table) == (0, [])


def test_finish_of_a_preempted_sequence(tight):
    driver, _, b = tight
    driver.step()
    assert driver.scheduler.finish("b", FinishReason.ABORT) == [b]
    assert driver.waiting == []
    assert driver.step() == [("a", 1, 1)]


@pytest.mark.parametrize("num_host_blocks", [0, 100], ids="recompute swap".split())
def test_a_pool_for_one_and_a_half_requests_does_not_thrash(make_scheduler, num_host_blocks):
    driver = make_scheduler(num_blocks=15, num_host_blocks=num_host_blocks)
    names = list("abcdef")
    for name in names:
        driver.add(name, 10, max_tokens=30)
    finished = []
    num_steps = num_computed = 0
    while driver.scheduler.has_unfinished:
        num_computed += sum(count for _, count, _ in driver.step())
        num_steps += 1
        finished += [output.request_id for output in driver.outputs if output.finish_reason]
        if driver.memory.under_way:
            driver.arrive()
    assert finished == names
    assert driver.scheduler.num_preemptions <= 9
    num_recomputed = num_computed - len(names) * (10 + 30 - 1)
    assert num_recomputed <= (0 if num_host_blocks else 180)
    assert num_steps <= 106 < len(names) * 30
    assert driver.cache.num_free_blocks == 15
