"""Preempted sequences whose KV waits in host memory and comes back.

A plan reads (name, tokens, how many draw a token), and a block holds 4 tokens. The driver's memory
checks that every slot that is read holds what the sequence once wrote.
"""

from __future__ import annotations

import pytest

from octavo.request import FinishReason
from octavo.sequence import SequenceStatus

RESTORING, RUNNING = SequenceStatus.RESTORING, SequenceStatus.RUNNING
SWAPPED, WAITING = SequenceStatus.SWAPPED, SequenceStatus.WAITING


@pytest.fixture
def make_tight(make_scheduler):
    """Make two sequences that fill all 5 blocks; in the next step the first needs one more."""

    def make(**options):
        driver = make_scheduler(num_blocks=5, **options)
        a, b = driver.add("a", 6, max_tokens=6), driver.add("b", 7)
        driver.step(31, 41)
        driver.step(32, 42)
        driver.step(33, 43)
        assert (a.block_table, b.block_table) == ([0, 1], [2, 3, 4])
        return driver, a, b

    return make


def test_kv_goes_to_the_host_and_its_blocks_are_reused_in_the_same_step(make_tight):
    driver, a, b = make_tight(num_host_blocks=4)
    output = driver.plan()
    assert output.copies.swap_out == ((2, 0), (3, 1), (4, 2))
    assert (b.status, b.block_table, b.host_table) == (SWAPPED, [], [0, 1, 2])
    assert (b.num_computed_tokens, b.num_tokens) == (9, 10)
    assert a.block_table == [0, 1, 2]
    assert (
        len(driver.scheduler.waiting.swapped_request_ids)
        == driver.scheduler.num_swap_preemptions
        == 1
    )
    assert driver.scheduler.num_recompute_preemptions == 0
    assert driver.run(output) == [("a", 1, 1)]


def test_kv_comes_back_and_the_sequence_goes_on_where_it_was(make_tight):
    driver, _, b = make_tight(num_host_blocks=4)
    driver.steps(3)
    assert (driver.running, driver.waiting) == ([], ["b"])
    output = driver.plan()
    (swap_in,) = output.copies.swap_in
    assert [host for host, _ in swap_in.pairs] == [0, 1, 2]
    assert [device for _, device in swap_in.pairs] == b.block_table
    assert driver.run(output) == []
    assert (b.status, len(driver.scheduler.waiting.swapped_request_ids)) == (RESTORING, 0)
    assert driver.step() == []
    driver.arrive()
    assert (b.status, b.host_table, driver.cache.num_used_host_blocks) == (RUNNING, [], 0)
    assert driver.step(44) == [("b", 1, 1)]
    assert b.token_ids == [*range(10, 17), 41, 42, 43, 44]


def test_others_run_while_kv_is_on_its_way_and_cannot_take_its_blocks(make_scheduler):
    driver = make_scheduler(num_blocks=8, num_host_blocks=4)
    driver.add("a", 6)
    b = driver.add("b", 9)
    driver.step()
    driver.scheduler.preempt(b, driver.now_s)
    assert driver.step() == [("a", 1, 1)]
    assert b.status is RESTORING
    table = list(b.block_table)
    # `a` takes all 5 blocks that `b` leaves, and then it must wait for `b` to arrive.
    plans = [driver.step() for _ in range(15)]
    assert plans == [*[[("a", 1, 1)]] * 13, [], []]
    assert b.block_table == table
    driver.arrive()
    assert driver.step() == [("a", 1, 1)]
    assert driver.preempted == ["b"]


def test_a_full_host_pool_falls_back_to_recomputation(make_tight):
    driver, _, b = make_tight(num_host_blocks=2)
    output = driver.plan()
    assert not output.copies
    assert (b.status, b.host_table, b.num_computed_tokens) == (WAITING, [], 0)
    assert driver.scheduler.num_recompute_preemptions == 1
    assert driver.scheduler.num_swap_preemptions == 0
    assert driver.run(output) == [("a", 1, 1)]


def test_the_cost_model_is_asked_with_blocks_and_computed_tokens(make_tight):
    asked = []

    def swap_pays(num_blocks, num_tokens):
        asked.append((num_blocks, num_tokens))
        return False

    driver, _, b = make_tight(num_host_blocks=4, swap_pays=swap_pays)
    driver.step()
    assert (asked, b.status) == ([(3, 9)], WAITING)


def test_the_cost_model_counts_no_block_that_a_window_has_left_behind(make_scheduler):
    asked = []
    driver = make_scheduler(window=4, swap_pays=lambda *costs: asked.append(costs))
    a = driver.add("a", 17)
    driver.step()
    assert len(a.block_table) == 5
    driver.scheduler.preempt(a, driver.now_s)
    assert asked == [(2, 17)]


def test_swapped_sequences_come_back_in_order_of_arrival_and_before_newcomers(make_scheduler):
    driver = make_scheduler(num_host_blocks=20, max_num_seqs=3)
    sequences = {name: driver.add(name, 6) for name in "abcd"}
    driver.step()
    for name in "bca":
        driver.scheduler.preempt(sequences[name], driver.now_s)
    assert driver.waiting == ["a", "b", "c", "d"]
    assert driver.step() == []
    assert [sequence.status for sequence in sequences.values()] == [*[RESTORING] * 3, WAITING]
    driver.arrive()
    assert driver.running == ["a", "b", "c"]


def test_requests_that_come_together_bring_what_they_share_back_once(make_scheduler):
    driver = make_scheduler(num_blocks=8, num_host_blocks=20, prefix_caching=True)
    driver.add("a", 17, max_tokens=1)
    driver.step()
    driver.add("filler", [0] * 30, max_tokens=1)
    driver.step()
    prompts = {name: [*range(10, 26), last] for last, name in enumerate("bcd")}
    b, c, d = (driver.add(name, prompt) for name, prompt in prompts.items())
    assert driver.step() == []
    assert (driver.running, driver.waiting) == ([], ["c", "d"])
    assert len(b.host_table) == 4
    driver.arrive()
    assert driver.step() == [("b", 1, 1), ("c", 1, 1), ("d", 1, 1)]
    assert b.block_table[:4] == c.block_table[:4] == d.block_table[:4]
    assert driver.cache.num_free_blocks == 1


def test_forks_that_were_swapped_share_their_prompt_again(make_scheduler):
    driver = make_scheduler(8, "priority", num_host_blocks=20, prefix_caching=True)
    driver.add("a", 18, n=3, priority=1)
    driver.step()
    driver.add("urgent", [1] * 30, max_tokens=1)
    assert driver.step() == [("urgent", 30, 1)]
    assert driver.preempted == ["a.2", "a.1", "a"]
    assert driver.step() == []
    assert driver.waiting == ["a.1", "a.2"]
    driver.arrive()
    assert driver.step() == [("a", 1, 1)]
    driver.arrive()
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1), ("a.2", 1, 1)]
    tables = [sequence.block_table for sequence in driver.scheduler.running]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert driver.cache.num_free_blocks == 1


def test_what_arrives_later_still_runs_in_order_of_arrival(make_scheduler):
    driver = make_scheduler(num_host_blocks=20)
    a, b = driver.add("a", 6), driver.add("b", 6)
    driver.step()
    driver.scheduler.preempt(a, driver.now_s)
    assert driver.step() == [("b", 1, 1)]
    driver.arrive()
    assert driver.step() == [("a", 1, 1), ("b", 1, 1)]
    assert b.num_preemptions == 0


def test_a_half_computed_prompt_is_swapped_and_goes_on_with_its_next_chunk(make_scheduler):
    driver = make_scheduler(num_host_blocks=20, max_num_batched_tokens=8)
    sequence = driver.add("a", 20)
    driver.steps(1)
    driver.scheduler.preempt(sequence, driver.now_s)
    driver.step()
    driver.arrive()
    assert driver.step() == [("a", 8, 0)]
    assert driver.step() == [("a", 4, 1)]


def test_one_that_computed_nothing_has_nothing_to_swap(make_scheduler):
    driver = make_scheduler(num_host_blocks=20, num_blocks=20)
    sequence = driver.add("a", 6)
    driver.plan()
    driver.scheduler.preempt(sequence, driver.now_s)
    assert (sequence.status, driver.cache.num_used_host_blocks) == (WAITING, 0)


def test_an_abort_while_swapped_returns_the_host_blocks(make_tight):
    driver, _, b = make_tight(num_host_blocks=4)
    driver.step()
    assert driver.scheduler.finish("b", FinishReason.ABORT) == [b]
    assert (
        driver.cache.num_used_host_blocks,
        len(driver.scheduler.waiting.swapped_request_ids),
    ) == (0, 0)
    assert driver.step() == [("a", 1, 1)]
    driver.step()
    assert not driver.scheduler.has_unfinished


def test_blocks_of_an_aborted_return_are_not_reused_before_it_arrives(make_tight):
    driver, _, b = make_tight(num_host_blocks=4)
    driver.steps(4)
    assert b.status is RESTORING
    assert driver.scheduler.finish("b", FinishReason.ABORT) == [b]
    assert driver.scheduler.has_unfinished
    assert list(driver.scheduler.sequences()) == []
    driver.add("c", 11)
    assert driver.step() == []
    assert driver.cache.num_free_blocks == 2
    driver.arrive()
    assert driver.cache.num_free_blocks == 5
    assert driver.step() == [("c", 11, 1)]


def test_time_away_is_told_apart_from_time_that_ran(make_tight):
    driver, _, b = make_tight(num_host_blocks=4)
    driver.now_s = 1.0
    driver.steps(4)
    driver.now_s = 3.0
    driver.arrive()
    assert b.status is RUNNING
    driver.now_s = 3.5
    driver.step(0)
    timing = driver.timings["b"]
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (0.0, 0.0, 1.5)
    assert (timing.preempted_s, timing.num_preemptions) == (2.0, 1)
