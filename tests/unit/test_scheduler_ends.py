"""How sequences end, which ones never begin, and what ending from outside leaves behind."""

from __future__ import annotations

import pytest

from octavo.errors import EngineError, InvalidRequest, PromptTooLong
from octavo.request import FinishReason, TokenLogprob, TokenOutput
from octavo.scheduler.output import SampledToken
from octavo.sequence import SequenceStatus

END = 0
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


@pytest.mark.parametrize(
    ("params", "drawn", "reason"),
    [
        ({}, [END], STOP),
        ({}, [9, END], STOP),
        ({"stop_token_ids": (42, 43)}, [43], STOP),
        ({"stop_token_ids": (42,)}, [END], STOP),
        ({"ignore_eos": True, "stop_token_ids": (42,)}, [END, 42], STOP),
        ({"ignore_eos": True, "stop_token_ids": (END,)}, [END], STOP),
        ({"ignore_eos": True, "max_tokens": 3}, [END, END, END], LENGTH),
        ({"max_tokens": 1}, [9], LENGTH),
        ({"max_tokens": 1}, [END], STOP),
        ({"max_tokens": 4}, [9, 9, 9, 9], LENGTH),
    ],
)
def test_the_first_reason_to_end_ends(make_scheduler, params, drawn, reason):
    driver = make_scheduler()
    sequence = driver.add("a", 5, **params)
    for token_id in drawn:
        assert driver.scheduler.has_unfinished
        driver.step(token_id)
    assert driver.outputs == [TokenOutput("a", (drawn[-1],), (), reason)]
    assert not driver.scheduler.has_unfinished
    assert sequence.finish_reason is reason
    assert sequence.status is SequenceStatus.FINISHED
    assert driver.cache.num_free_blocks == 100


@pytest.mark.parametrize("limits", [{"max_model_len": 8}, {"num_blocks": 2}])
def test_a_full_context_or_pool_ends_with_length(make_scheduler, limits):
    driver = make_scheduler(**limits)
    sequence = driver.add("a", 5)
    for _ in range(3):
        assert driver.scheduler.has_unfinished
        driver.step()
    assert driver.outputs == [TokenOutput("a", (9,), (), LENGTH)]
    assert sequence.num_tokens == 8


def test_a_log_probability_travels_with_its_token(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5)
    output = driver.plan()
    driver.scheduler.advance(output)
    driver.scheduler.expect(output.sampling)
    logprobs = (TokenLogprob(7, -0.5, 2), TokenLogprob(3, -0.25, 1))
    assert driver.scheduler.update(output, (SampledToken(7, logprobs),), now_s=0.0) == [
        TokenOutput("a", (7,), (logprobs,))
    ]


@pytest.mark.parametrize("limits", [{"max_model_len": 8}, {"num_blocks": 2}])
def test_a_prompt_that_never_fits_is_refused(make_scheduler, limits):
    driver = make_scheduler(**limits)
    with pytest.raises(
        PromptTooLong,
        match=r"^prompt has 8 tokens but one sequence can hold 8 with its output; shorten it or",
    ):
        driver.add("a", 8)
    assert not driver.scheduler.has_unfinished
    driver.add("a", 7)
    assert driver.step() == [("a", 7, 1)]


def test_a_live_id_is_refused_and_a_finished_one_may_return(make_scheduler):
    driver = make_scheduler()
    driver.add("a", 5, max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"^request id 'a' is already in use$"):
        driver.add("a", 3)
    assert driver.step() == [("a", 5, 1)]
    driver.add("a", 3)
    assert driver.step() == [("a", 3, 1)]


def test_an_empty_prompt_is_refused(make_scheduler):
    driver = make_scheduler()
    with pytest.raises(InvalidRequest, match=r"^the prompt has 0 tokens but must have at least 1$"):
        driver.add("a", 0)
    assert not driver.scheduler.has_unfinished


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5], ids="waiting prefilling prefilled old".split())
def test_finish_from_outside_frees_at_once_and_disturbs_nobody(make_scheduler, num_steps):
    driver = make_scheduler(max_num_batched_tokens=8)
    other, sequence = driver.add("other", 3), driver.add("a", 9)
    driver.steps(num_steps)
    assert driver.scheduler.finish("a", ABORT) == [sequence]
    assert (sequence.finish_reason, sequence.block_table) == (ABORT, [])
    driver.scheduler.check_integrity()
    assert driver.cache.num_free_blocks == 100 - len(other.block_table)
    assert driver.step() == [("other", 1 if num_steps else 3, 1)]
    assert driver.scheduler.finish("a", ABORT) == []


@pytest.mark.parametrize("host_blocks", [0, 10], ids="recomputing swapped".split())
@pytest.mark.parametrize("is_back", [False, True], ids="away back".split())
def test_finish_of_a_preempted_sequence_frees_all_it_has(make_scheduler, host_blocks, is_back):
    driver = make_scheduler(num_host_blocks=host_blocks)
    sequence = driver.add("a", 9)
    driver.step()
    driver.scheduler.preempt(sequence, driver.now_s)
    if is_back:
        driver.step()
    assert driver.scheduler.finish("a", ABORT) == [sequence]
    assert (sequence.finish_reason, sequence.status) == (ABORT, SequenceStatus.FINISHED)
    driver.arrive()
    assert (driver.cache.num_free_blocks, driver.cache.num_used_host_blocks) == (100, 0)
    assert driver.step() == []
    assert not driver.scheduler.has_unfinished


def test_finish_of_an_unknown_id_does_nothing(make_scheduler):
    driver = make_scheduler()
    assert driver.scheduler.finish("never", ABORT) == []


@pytest.mark.parametrize("damage", ["lost", "doubled", "short table", "lost seat"])
def test_check_integrity_finds_what_is_out_of_place(make_scheduler, damage):
    driver = make_scheduler()
    sequence = driver.add("a", 12)
    driver.step()
    if damage == "lost":
        driver.scheduler.running.clear()
    elif damage == "doubled":
        driver.scheduler.waiting.push(sequence)
    elif damage == "short table":
        sequence.num_computed_tokens = 17
    else:
        sequence.num_seats = 2
    with pytest.raises(EngineError):
        driver.scheduler.check_integrity()
