"""Offline generation: several answers a prompt, scheduling parameters, and what is refused."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams, SchedulingParams
from octavo.errors import InvalidRequest, QueueFull
from octavo.request import FinishReason

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"


@pytest.fixture(scope="module")
def llm(checkpoints):
    return LLM(
        str(checkpoints["demo"]),
        max_model_len=512,
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_queued_requests=3,
        cpu_threads=1,
    )


def test_each_prompt_has_n_answers_of_which_the_first_is_that_of_n_1(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    completions = llm.generate(["Water boils at", PROMPT], params)
    for completion in completions:
        assert len(completion.answers) == 3
        assert [len(answer.token_ids) for answer in completion.answers] == [6, 6, 6]
        first = completion.answers[0]
        assert (completion.text, completion.token_ids) == (first.text, first.token_ids)
        assert completion.finish_reason is FinishReason.LENGTH
    alone = llm.generate(PROMPT, SamplingParams(seed=5, max_tokens=6, ignore_eos=True))
    assert alone[0].token_ids == completions[1].token_ids


def test_answers_of_beams_are_the_likeliest_the_best_first(llm):
    params = SamplingParams(n=3, beam_width=4, max_tokens=8, logprobs=0, ignore_eos=True)
    (completion,) = llm.generate(PROMPT, params)
    assert completion.text.startswith(" 13, 14")
    sums = [answer.cumulative_logprob for answer in completion.answers]
    assert sums == sorted(sums, reverse=True)
    assert len({answer.token_ids for answer in completion.answers}) == 3
    (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=0))
    assert greedy.answers[0].cumulative_logprob <= sums[0]


def test_a_stop_string_ends_its_own_answer_alone(llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    (whole,) = llm.generate(PROMPT, params)
    assert whole.text == " 13, 14, 15,"
    params = SamplingParams(n=2, temperature=0, max_tokens=12, stop="14")
    (stopped,) = llm.generate(PROMPT, params)
    for answer in stopped.answers:
        assert (answer.text, answer.finish_reason) == (" 13, ", FinishReason.STOP)
        assert answer.timing.decode_s > 0.0


def test_answers_and_prompts_are_told_of_their_tokens(llm):
    params = SamplingParams(n=2, seed=3, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (completion,) = llm.generate(PROMPT, params)
    assert completion.logprobs == completion.answers[0].logprobs
    for answer in completion.answers:
        assert tuple(own.token_id for own, *_ in answer.logprobs) == answer.token_ids
        total = sum(own.logprob for own, *_ in answer.logprobs)
        assert answer.cumulative_logprob == total < 0.0
    first, *places = completion.prompt_logprobs
    assert first is None
    assert tuple(own.token_id for own, *_ in places) == completion.prompt_token_ids[1:]
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert (plain.logprobs, plain.prompt_logprobs) == ((), None)
    assert plain.answers[0].cumulative_logprob == 0.0


def test_a_stop_string_cuts_log_probabilities_with_the_tokens(llm):
    params = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    (whole,) = llm.generate(PROMPT, SamplingParams(**params))
    (stopped,) = llm.generate(PROMPT, SamplingParams(**params, stop="14"))
    assert 0 < len(stopped.token_ids) < len(whole.token_ids)
    assert stopped.logprobs == whole.logprobs[: len(stopped.token_ids)]


@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_engine_reports_are_refused(llm, key):
    with pytest.raises(InvalidRequest, match=f"^{key} is 21 but must be an integer from 0 to 20"):
        llm.generate(PROMPT, SamplingParams(**{key: 21}))


def test_answers_have_the_form_that_they_must_have(llm):
    form = {"choice": ["positive", "negative", "neither"]}
    params = SamplingParams(n=3, seed=1, temperature=1.5, structured_outputs=form)
    (completion,) = llm.generate("A sentiment:", params)
    assert {answer.text for answer in completion.answers} <= {*form["choice"]}
    assert {answer.finish_reason for answer in completion.answers} == {FinishReason.STOP}
    bad = SamplingParams(structured_outputs={"regex": "(a"})
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex does not compile: "):
        llm.generate([PROMPT, PROMPT], [params, bad])
    assert not llm.engine.has_unfinished


def test_salts_keep_caches_apart(llm):
    params = SamplingParams(max_tokens=1)
    cached = [
        llm.generate(PROMPT, params, SchedulingParams(cache_salt=salt))[0].answers[0].timing
        for salt in ("mine", "other", "mine")
    ]
    assert [timing.num_cached_tokens for timing in cached] == [0, 0, 32]


def test_a_deadline_ends_an_answer_with_what_it_has(llm):
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    plans = [SchedulingParams(deadline_ms=0.001), SchedulingParams(deadline_ms=1000)]
    late, partial = llm.generate([PROMPT, PROMPT], params, plans)
    assert (late.text, late.finish_reason) == ("", FinishReason.DEADLINE)
    assert partial.finish_reason is FinishReason.DEADLINE
    assert 0 < len(partial.token_ids) < 400


def test_what_is_refused_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequest, match=r"^2 prompts have 3 sampling parameters$"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(InvalidRequest, match=r"^1 prompts have 2 scheduling parameters$"):
        llm.generate("a", None, [SchedulingParams()] * 2)
    with pytest.raises(InvalidRequest, match="max_num_seqs"):
        llm.generate(["a", "b"], SamplingParams(n=5))
    with pytest.raises(QueueFull, match="max_num_queued_requests"):
        llm.generate(["a"] * 9)
    assert not llm.engine.has_unfinished
    llm.engine.check_integrity()


def test_single_tokens_are_ruled_as_asked(llm):
    greedy = {"temperature": 0, "max_tokens": 12}
    (digit_ids,) = [llm.tokenizer.encode(" 0123456789,", add_special_tokens=False)]
    rules = [
        {"bad_words": ["13"]},
        {"logit_bias": {llm.tokenizer.encode("\n", add_special_tokens=False)[0]: 100}},
        {"allowed_token_ids": digit_ids[:-1]},
        {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 1.5},
        {},
    ]
    params = [SamplingParams.from_mapping({**greedy, **each}) for each in rules]
    banned, newlines, spaced, varied, plain = llm.generate([PROMPT] * 5, params)
    assert plain.text == " 13, 14, 15,"
    assert "13" not in banned.text
    assert newlines.text == "\n" * 12
    assert "," not in spaced.text
    assert set(spaced.text) <= set(" 0123456789")
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))
