"""A step is planned while the one before it is under way and its tokens have no ids yet."""

from __future__ import annotations

import pytest

from octavo.errors import EngineError, InvalidRequest
from octavo.request import FinishReason, TokenOutput
from octavo.sequence import PENDING_TOKEN, SequenceStatus


@pytest.fixture
def make_driver(make_scheduler):
    """Make a driver that is one step ahead."""

    def make(*args, **options):
        driver = make_scheduler(*args, **options)
        driver.steps_ahead = 1
        return driver

    return make


def test_a_token_counts_before_its_id_is_known(make_driver):
    driver = make_driver()
    sequence = driver.add("a", [1, 2, 3])
    assert driver.step(7) == [("a", 3, 1)]
    assert driver.outputs == []
    assert sequence.token_ids == [1, 2, 3, PENDING_TOKEN]
    assert driver.step(8) == [("a", 1, 1)]
    assert driver.outputs == [TokenOutput("a", (7,))]
    assert sequence.token_ids == [1, 2, 3, 7, PENDING_TOKEN]


def test_pending_tokens_say_from_which_row_they_come(make_driver):
    driver = make_driver(max_num_batched_tokens=8)
    first, long, last = driver.add("a", 2), driver.add("b", 5), driver.add("c", 1)
    assert driver.step() == [("a", 2, 1), ("b", 5, 1), ("c", 1, 1)]
    assert [s.pending_row for s in (first, long, last)] == [0, 1, 2]
    driver.scheduler.finish("a", FinishReason.ABORT)
    driver.step()
    assert [s.pending_row for s in (long, last)] == [0, 1]


def test_the_last_token_is_not_computed_while_it_is_drawn(make_driver):
    driver = make_driver()
    driver.add("a", 3, max_tokens=2)
    assert driver.step() == [("a", 3, 1)]
    assert driver.step() == [("a", 1, 1)]
    assert driver.step() == []
    assert driver.outputs == [TokenOutput("a", (9,), (), FinishReason.LENGTH)]
    assert not driver.scheduler.has_unfinished


def test_a_row_launched_before_its_sequence_stopped_is_dropped(make_driver):
    driver = make_driver()
    driver.add("a", 3)
    driver.add("b", 3)
    driver.step(0, 5)
    assert driver.step(6, 7) == [("a", 1, 1), ("b", 1, 1)]
    assert driver.outputs == [
        TokenOutput("a", (0,), (), FinishReason.STOP),
        TokenOutput("b", (5,)),
    ]
    assert driver.step() == [("b", 1, 1)]
    assert driver.outputs == [TokenOutput("b", (7,))]


def test_who_makes_room_returns_only_when_its_token_is_known(make_driver):
    driver = make_driver()
    sequence = driver.add("a", 3)
    driver.step(7)
    driver.scheduler.preempt(sequence, driver.now_s)
    assert sequence.token_ids[-1] == PENDING_TOKEN
    assert driver.step() == []
    assert driver.outputs == [TokenOutput("a", (7,))]
    assert sequence.status is SequenceStatus.WAITING
    assert driver.step() == [("a", 4, 1)]


def test_a_chunk_under_way_when_its_sequence_made_room_is_not_published(make_driver):
    driver = make_driver(prefix_caching=True, max_num_batched_tokens=8)
    sequence = driver.add("a", 20)
    assert driver.step() == [("a", 8, 0)]
    driver.scheduler.preempt(sequence, driver.now_s)
    assert driver.step() == []
    assert driver.cache.num_cached_blocks == 0
    assert driver.step() == [("a", 8, 0)]
    assert sequence.num_unlanded_tokens == 8


def test_a_prompt_that_a_step_under_way_computes_is_waited_for(make_driver):
    driver = make_driver(prefix_caching=True)
    driver.add("a", 10)
    assert driver.step() == [("a", 10, 1)]
    driver.add("b", 10)
    assert driver.step() == [("a", 1, 1)]
    assert driver.step() == [("a", 1, 1), ("b", 2, 1)]


def test_blocks_are_published_when_their_step_has_landed(make_driver, make_sequence):
    driver = make_driver(prefix_caching=True)
    driver.add("a", 8)
    driver.step()
    other = make_sequence("b", 9)
    assert driver.cache.find_cached(other).num_tokens == 0
    driver.step()
    assert driver.cache.find_cached(other).num_tokens == 8


def test_forks_draw_their_second_token_before_their_first_is_known(make_driver):
    driver = make_driver()
    driver.add("a", 5, n=3)
    assert driver.step(4, 5, 6) == [("a", 5, 3)]
    assert driver.step(7, 8, 9) == [("a", 1, 1), ("a.1", 1, 1), ("a.2", 1, 1)]
    assert [output.token_ids for output in driver.outputs] == [(4,), (5,), (6,)]
    driver.step()
    assert [output.token_ids for output in driver.outputs] == [(7,), (8,), (9,)]


def test_an_abort_drops_what_is_under_way(make_driver):
    driver = make_driver()
    driver.add("a", 3)
    driver.step()
    driver.scheduler.finish("a", FinishReason.ABORT)
    assert not driver.scheduler.has_unfinished
    again = driver.add("a", 2)
    assert driver.step(8) == [("a", 2, 1)]
    assert driver.outputs == []
    driver.step()
    assert driver.outputs == [TokenOutput("a", (8,))]
    assert again.num_output_tokens == 2


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_row_of_which_nothing_can_be_drawn_ends_its_request_alone(
    make_scheduler, make_sequence, steps_ahead
):
    driver = make_scheduler(prefix_caching=True)
    driver.steps_ahead = steps_ahead
    driver.add("a", [1] * 8, n=2)
    driver.add("b", [2] * 8)
    driver.step(-1, -1, 5)
    if steps_ahead:
        driver.step(6, 6, 6)
    *failed, other = driver.outputs
    message = "no token can be drawn: the model's logits are not finite"
    for index, output in enumerate(failed):
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())
        assert (output.index, str(output.error)) == (index, message)
        assert isinstance(output.error, EngineError)
    assert other == TokenOutput("b", (5,))
    assert len(failed) == 2
    assert driver.cache.find_cached(make_sequence("c", [1] * 9)).num_tokens == 0
    assert driver.cache.find_cached(make_sequence("d", [2] * 9)).num_tokens == 8


@pytest.mark.parametrize(
    ("params", "keys"),
    [
        ({"allowed_token_ids": [4]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [4], "bad_words": "x", "min_tokens": 9},
            "allowed_token_ids, bad_words, min_tokens",
        ),
        ({"bad_words": "x", "min_tokens": 1}, "bad_words"),
    ],
)
def test_the_error_names_what_may_rule_out_every_token(make_scheduler, params, keys):
    driver = make_scheduler()
    driver.add("a", [1, 2], **params)
    driver.step(5)
    driver.step(-1)
    (output,) = driver.outputs
    why = f"{keys} must leave one after 1 tokens, unless the model's logits are not finite"
    assert isinstance(output.error, InvalidRequest)
    assert str(output.error) == f"no token can be drawn: {why}"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_chunk_of_a_prompt_that_leads_nowhere_is_reused(
    make_scheduler, make_sequence, steps_ahead
):
    driver = make_scheduler(prefix_caching=True, max_num_batched_tokens=8)
    driver.steps_ahead = steps_ahead
    driver.add("a", [1] * 20)
    driver.steps(2)
    driver.step(-1)
    if steps_ahead:
        driver.step()
    assert [output.finish_reason for output in driver.outputs] == [FinishReason.ERROR]
    assert driver.cache.find_cached(make_sequence("b", [1] * 21)).num_tokens == 0
    assert driver.cache.num_cached_blocks == 0


def test_a_request_that_rules_out_every_token_takes_no_prefix_from_others(
    make_scheduler, make_sequence
):
    driver = make_scheduler(prefix_caching=True)
    driver.add("a", [1] * 12)
    driver.step()
    driver.add("b", [1] * 13, allowed_token_ids=[4])
    driver.step(5, -1)
    assert isinstance(driver.outputs[1].error, InvalidRequest)
    assert driver.cache.find_cached(make_sequence("c", [1] * 13)).num_tokens == 12
