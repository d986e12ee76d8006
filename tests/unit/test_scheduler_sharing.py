"""Answers that share their prompt's blocks, and prompts that reuse what was computed before.

A plan reads (name, tokens, how many draw a token), and a block holds 4 tokens. The driver's memory
checks that no shared block is written and that every slot holds the reader's own past.
"""

from __future__ import annotations

import pytest

from octavo.request import FinishReason, TokenOutput
from octavo.sequence import SequenceStatus

ABORT, LENGTH, STOP = FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP


def test_n_answers_draw_from_one_prefill_and_then_each_goes_on(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5, n=3)
    assert driver.step(31, 32, 33) == [("a", 5, 3)]
    assert driver.outputs == [
        TokenOutput("a", (31,)),
        TokenOutput("a", (32,), index=1),
        TokenOutput("a", (33,), index=2),
    ]
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1), ("a.2", 1, 1)]
    tokens = [sequence.token_ids[5:] for sequence in driver.scheduler.running]
    assert tokens == [[31, 9], [32, 9], [33, 9]]


def test_forks_begin_with_the_last_chunk(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 12, n=2)
    assert driver.step() == [("a", 8, 0)]
    assert driver.step() == [("a", 4, 2)]
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1)]


def test_a_shared_partly_filled_block_is_copied_when_first_written(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=3)
    driver.step()
    assert [sequence.block_table for sequence in driver.scheduler.running] == [[0, 1]] * 3
    output = driver.plan()
    assert output.copies.copies == ((1, 2), (1, 3))
    tables = [sequence.block_table for sequence in driver.scheduler.running]
    assert tables == [[0, 2], [0, 3], [0, 1]]
    driver.run(output)
    assert not driver.plan().copies


def test_full_shared_blocks_are_never_copied(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 8, n=2)
    driver.step()
    output = driver.plan()
    assert not output.copies
    tables = [sequence.block_table for sequence in driver.scheduler.running]
    assert tables == [[0, 1, 2], [0, 1, 3]]
    driver.run(output)


def test_a_request_of_n_takes_n_seats_from_its_admission_on(make_scheduler):
    driver = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    driver.add("a", 12, n=3)
    driver.add("b", 3, n=2)
    driver.add("c", 3)
    driver.step()
    assert driver.waiting == ["b", "c"]
    driver.step(9, 0, 9)
    assert driver.step() == [("a", 1, 1), ("a.2", 1, 1), ("b", 3, 2)]
    assert driver.waiting == ["c"]


def test_each_answer_ends_on_its_own_and_gives_its_blocks_back(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=3, max_tokens=3)
    driver.step(9, 0, 9)
    assert [output.finish_reason for output in driver.outputs] == [None, STOP, None]
    assert driver.running == ["a", "a.2"]
    assert driver.step(9, 0) == [("a", 1, 1), ("a.2", 1, 1)]
    assert driver.running == ["a"]
    assert driver.cache.num_free_blocks == 98
    assert driver.step(7) == [("a", 1, 1)]
    assert driver.outputs == [TokenOutput("a", (7,), (), LENGTH)]
    assert driver.cache.num_free_blocks == 100
    assert not driver.scheduler.has_unfinished


def test_all_answers_may_end_with_their_first_token(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=3, max_tokens=1)
    driver.step()
    assert [output.finish_reason for output in driver.outputs] == [LENGTH] * 3
    assert driver.cache.num_free_blocks == 100
    assert not driver.scheduler.has_unfinished


def test_an_id_is_in_use_until_the_last_answer_ends(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=2)
    driver.step(0, 9)
    with pytest.raises(Exception, match=r"^request id 'a' is already in use$"):
        driver.add("a")
    driver.step(0)
    driver.add("a")


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_ends_all_answers(make_scheduler, num_steps):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 12, n=3)
    driver.steps(num_steps)
    ended = driver.scheduler.finish("a", ABORT)
    assert len(ended) == (3 if num_steps >= 2 else 1)
    assert {sequence.finish_reason for sequence in ended} == {ABORT}
    assert driver.cache.num_free_blocks == 100
    assert driver.step() == []
    assert not driver.scheduler.has_unfinished


def test_an_abort_of_one_answer_leaves_the_others(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=3)
    driver.steps(2)
    (ended,) = driver.scheduler.finish("a", ABORT, index=0)
    assert (ended.index, ended.status) == (0, SequenceStatus.FINISHED)
    assert driver.step() == [("a.1", 1, 1), ("a.2", 1, 1)]
    assert driver.scheduler.finish("a", ABORT, index=0) == []


def test_a_preempted_fork_comes_back_alone(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 6, n=2)
    driver.step(31, 32)
    fork = driver.scheduler.running[1]
    driver.scheduler.preempt(fork, driver.now_s)
    assert driver.waiting == ["a.1"]
    assert driver.step(41, 42) == [("a", 1, 1), ("a.1", 7, 1)]
    assert fork.token_ids == [*range(10, 16), 32, 42]


def test_a_fork_that_is_swapped_out_leaves_the_shared_blocks_to_the_others(make_scheduler):
    driver = make_scheduler(num_host_blocks=10)
    driver.add("a", 6, n=2)
    driver.steps(2)
    fork = driver.scheduler.running[1]
    driver.scheduler.preempt(fork, driver.now_s)
    assert fork.status is SequenceStatus.SWAPPED
    assert driver.step() == [("a", 1, 1)]
    driver.arrive()
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1)]


@pytest.fixture
def caching(make_scheduler):
    """Return a driven scheduler that reuses prefixes."""
    return make_scheduler(prefix_caching=True)


def test_a_prompt_that_was_computed_before_is_computed_from_its_last_full_block_on(caching):
    caching.add("a", 9, max_tokens=1)
    caching.step()
    b = caching.add("b", 9)
    assert caching.step() == [("b", 1, 1)]
    assert b.num_cached_tokens == 8
    assert (caching.cache.num_query_tokens, caching.cache.num_hit_tokens) == (18, 8)


def test_the_last_token_of_a_prompt_is_always_computed(caching):
    caching.add("a", 8, max_tokens=1)
    caching.step()
    b = caching.add("b", 8)
    assert caching.step() == [("b", 4, 1)]
    assert b.num_cached_tokens == 4


def test_only_the_common_beginning_is_reused(caching):
    caching.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    caching.step()
    caching.add("b", [1, 2, 3, 4, 5, 6, 7, 0, 9])
    caching.add("c", [0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert caching.step() == [("b", 5, 1), ("c", 9, 1)]


def test_generated_tokens_are_reused(caching):
    caching.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    for token_id in (7, 8, 9, 10):
        caching.step(token_id)
    caching.add("b", list(range(1, 14)))
    assert caching.step() == [("b", 5, 1)]


def test_another_salt_shares_nothing(caching):
    caching.add("a", 9, max_tokens=1, cache_salt="x")
    caching.step()
    caching.add("b", 9, cache_salt="y")
    caching.add("c", 9, cache_salt="x")
    assert caching.step() == [("b", 9, 1), ("c", 1, 1)]


def test_prompts_that_begin_alike_wait_a_step_and_compute_it_once(caching):
    for name in "abcd":
        caching.add(name, 9)
    assert caching.step() == [("a", 9, 1)]
    assert caching.waiting == ["b", "c", "d"]
    assert caching.step() == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("d", 1, 1)]
    tables = [sequence.block_table for sequence in caching.scheduler.running]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4


def test_prompts_whose_common_beginning_is_shorter_than_a_block_do_not_wait(caching):
    caching.add("a", [1, 2, 3, 4, 5])
    caching.add("b", [1, 2, 3, 5, 4])
    assert caching.step() == [("a", 5, 1), ("b", 5, 1)]


def test_a_preempted_sequence_finds_its_own_blocks_again(caching):
    sequence = caching.add("a", 9)
    caching.step()
    caching.scheduler.preempt(sequence, caching.now_s)
    assert caching.step() == [("a", 2, 1)]


def test_a_chunk_that_was_never_computed_is_not_found(caching):
    caching.add("a", 9)
    caching.plan()
    caching.scheduler.finish("a", ABORT)
    caching.add("b", 9)
    assert caching.step() == [("b", 9, 1)]


def test_what_was_evicted_to_the_host_comes_back_from_there(make_scheduler):
    driver = make_scheduler(num_blocks=6, num_host_blocks=6, prefix_caching=True)
    driver.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    driver.step()
    driver.add("b", list(range(30, 53)), max_tokens=1)
    driver.step()
    again = driver.add("c", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert driver.step() == []
    assert again.status is SequenceStatus.RESTORING
    driver.arrive()
    assert driver.step() == [("c", 1, 1)]
    assert again.num_cached_tokens == 8
