"""Each token of a prompt that is to be scored is, by one row of one step; blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from octavo.request import FinishReason, TokenLogprob

PROMPT = list(range(10, 21))


@pytest.fixture
def scored():
    """Return what a planned step scores: name, row before the first token, tokens."""
    return lambda output: [
        (prompt.sequence.request_id, prompt.first_row, list(prompt.token_ids))
        for prompt in output.scored
    ]


def told(outputs) -> dict[str, list[int]]:
    """Return the prompt tokens that outputs tell of, by name."""
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        ids = [first.token_id for first, *_ in output.prompt_logprobs]
        tokens.setdefault(output.request_id, []).extend(ids)
    return tokens


def test_chunks_score_the_token_behind_each_of_their_rows(make_scheduler, scored):
    driver = make_scheduler(max_num_batched_tokens=5)
    driver.add("a", PROMPT, prompt_logprobs=0)
    for tokens in ([11, 12, 13, 14, 15], [16, 17, 18, 19, 20]):
        output = driver.plan()
        assert scored(output) == [("a", 0, tokens)]
        driver.run(output)
        assert told(driver.outputs) == {"a": tokens}
    output = driver.plan()  # computes the last token, which says what comes next
    assert scored(output) == []
    driver.run(output)
    assert [each.token_ids for each in driver.outputs] == [(9,)]


def test_rows_are_counted_over_the_whole_step(make_scheduler, scored):
    driver = make_scheduler()
    driver.add("a", 3)
    driver.add("b", PROMPT[:4], prompt_logprobs=1)
    driver.add("c", [7], prompt_logprobs=1)
    driver.add("d", PROMPT[:2], prompt_logprobs=1)
    output = driver.plan()
    assert scored(output) == [("b", 3, [11, 12, 13]), ("d", 8, [11])]
    driver.run(output)
    assert scored(driver.plan()) == []


def test_outputs_with_scores_come_before_those_with_tokens(make_scheduler):
    driver = make_scheduler()
    driver.add("a", PROMPT[:3], prompt_logprobs=0, n=2)
    driver.step()
    assert [(each.index, each.token_ids) for each in driver.outputs] == [
        (0, ()),
        (0, (9,)),
        (1, (9,)),
    ]
    assert driver.outputs[0].prompt_logprobs == (
        (TokenLogprob(11, -1.0, 1),),
        (TokenLogprob(12, -1.0, 1),),
    )


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_what_is_computed_again_is_not_scored_again(make_scheduler, scored, steps_ahead):
    driver = make_scheduler(max_num_batched_tokens=4)
    driver.steps_ahead = steps_ahead
    sequence = driver.add("a", PROMPT, prompt_logprobs=0)
    tokens = []
    for preempts in (False, True, False, True, *[False] * 8):
        driver.step()
        tokens += told(driver.outputs).get("a", [])
        if preempts:
            driver.scheduler.preempt(sequence, now_s=0.0)
    assert tokens == PROMPT[1:]
    assert sequence.num_preemptions == 2


def test_a_cached_prefix_is_read_as_far_as_its_tokens_are_scored(make_scheduler, scored):
    driver = make_scheduler(prefix_caching=True)
    driver.add("first", PROMPT)
    driver.step()
    driver.add("scored", PROMPT, prompt_logprobs=0)
    assert driver.step() == [("first", 1, 1), ("scored", 11, 1)]
    sequence = next(s for s in driver.scheduler.running if s.request_id == "scored")
    assert sequence.num_cached_tokens == 0
    driver.scheduler.preempt(sequence, now_s=0.0)
    output = driver.plan()
    assert scored(output) == []
    assert [count for _, count, _ in output.scheduled] == [1, 4]  # 8 of 12 tokens are cached


def test_a_prompt_half_scored_reads_what_was_scored_from_the_cache(make_scheduler, scored):
    driver = make_scheduler(prefix_caching=True, max_num_batched_tokens=10)
    sequence = driver.add("a", PROMPT, prompt_logprobs=0)
    driver.step()
    driver.scheduler.preempt(sequence, now_s=0.0)
    output = driver.plan()
    assert output.scheduled[0].sequence.num_computed_tokens == 8
    assert scored(output) == []
    assert output.scheduled[0].num_scheduled_tokens == 3


def test_one_that_ended_meanwhile_is_told_nothing(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=4)
    driver.steps_ahead = 1
    driver.add("a", PROMPT, prompt_logprobs=0)
    driver.add("b", 3)
    driver.step()
    driver.scheduler.finish("a", FinishReason.ABORT)
    driver.step()
    assert driver.outputs == []
