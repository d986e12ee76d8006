"""Steps of a pipeline: several compute at once, and each takes its share of those who run."""

from __future__ import annotations

import pytest

from octavo.request import FinishReason, TokenOutput
from octavo.sequence import SequenceStatus


@pytest.fixture
def make_driver(make_scheduler):
    """Make a driver of a pipeline of some stages, all of which are kept busy."""

    def make(num_stages=2, **options):
        driver = make_scheduler(num_stages=num_stages, **options)
        driver.steps_ahead = num_stages - 1
        return driver

    return make


def test_stages_take_turns_with_those_who_run(make_driver):
    driver = make_driver()
    for name in "abcd":
        driver.add(name, 2)
    driver.steps(4)
    turns = [driver.step() for _ in range(4)]
    first, second = turns[:2]
    assert {name for name, *_ in (*first, *second)} == set("abcd")
    assert turns == [first, second, first, second]
    assert len(first) == len(second) == 2


def test_a_sequence_is_left_alone_while_its_next_token_is_drawn(make_driver):
    driver = make_driver()
    sequence = driver.add("a", [1, 2, 3])
    assert driver.step(7) == [("a", 3, 1)]
    assert sequence.token_ids == [1, 2, 3]
    assert driver.step(8) == []
    assert driver.outputs == [TokenOutput("a", (7,))]
    assert sequence.token_ids == [1, 2, 3, 7]
    assert driver.step(8) == [("a", 1, 1)]


def test_chunks_of_a_prompt_follow_each_other_through_the_stages(make_driver):
    driver = make_driver(max_num_batched_tokens=8)
    driver.add("a", 20)
    assert [driver.step() for _ in range(4)] == [
        [("a", 8, 0)],
        [("a", 8, 0)],
        [("a", 4, 1)],
        [],
    ]
    assert driver.outputs == [TokenOutput("a", (9,))]


def test_one_stage_of_one_takes_all_who_run(make_driver):
    driver = make_driver(num_stages=1)
    for name in "abc":
        driver.add(name, 2)
    assert driver.step() == [("a", 2, 1), ("b", 2, 1), ("c", 2, 1)]


def test_who_makes_room_in_mid_flight_keeps_the_token_that_is_drawn(make_driver):
    driver = make_driver(num_host_blocks=8)
    sequence = driver.add("a", 5)
    assert driver.step(7) == [("a", 5, 1)]
    driver.scheduler.preempt(sequence, driver.now_s)
    assert driver.step() == []
    assert driver.outputs == [TokenOutput("a", (7,))]
    assert sequence.status is SequenceStatus.SWAPPED
    driver.step()
    driver.arrive()
    assert driver.step(8) == [("a", 1, 1)]


def test_an_abort_in_mid_flight_drops_what_is_drawn(make_driver):
    driver = make_driver()
    driver.add("a", 3)
    driver.step()
    driver.scheduler.finish("a", FinishReason.ABORT)
    assert driver.cache.num_free_blocks == driver.cache.num_blocks
    driver.add("b", 2)
    assert driver.step() == [("b", 2, 1)]
    driver.step()
    assert driver.outputs == [TokenOutput("b", (9,))]


def test_forks_begin_with_the_step_that_draws_their_first_tokens(make_driver):
    driver = make_driver()
    driver.add("a", 5, n=3)
    assert driver.step(4, 5, 6) == [("a", 5, 3)]
    assert driver.running == ["a", "a.1", "a.2"]
    assert driver.step() == []
    assert [output.token_ids for output in driver.outputs] == [(4,), (5,), (6,)]
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1)]
    assert driver.step() == [("a.2", 1, 1)]
