"""Beams through the engine: the same answers, to the bit, whatever else happens."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest, PromptTooLong
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams

LENGTHS = [3, 40, 70, 33]
PARAMS = [
    SamplingParams(n=3, beam_width=4, max_tokens=45, logprobs=0),
    SamplingParams(n=2, beam_width=2, max_tokens=50, logprobs=3, length_penalty=2.0),
    SamplingParams(beam_width=3, max_tokens=40, logprobs=0, stop_token_ids=tuple(range(30, 60))),
    SamplingParams(n=4, beam_width=4, max_tokens=45, logprobs=0, ignore_eos=True),
]


@pytest.fixture(scope="module")
def asks(make_prompts):
    return list(zip(make_prompts(LENGTHS), PARAMS, strict=True))


@pytest.fixture
def make_beam_driver(make_driver):
    """Make a driver over the tiny llama in float32."""

    def make(**options):
        values = {"dtype": "float32", "max_num_seqs": 16, "cpu_threads": 1, **options}
        return make_driver("llama", **values)

    return make


@pytest.fixture
def alone(make_beam_driver, asks):
    """What each of `asks` answers alone, with room for everything."""
    driver = make_beam_driver(enable_prefix_caching=False)
    for index, (prompt, params) in enumerate(asks):
        driver.add(str(index), prompt, params)
        driver.run()
    return answers_of(driver, asks)


def answers_of(driver, asks):
    outputs = {}
    for name, (_, params) in enumerate(asks):
        for index in range(params.n):
            (output,) = driver.outputs[str(name), index]
            outputs[name, index] = output.token_ids, output.logprobs, output.finish_reason
    return outputs


def test_each_answer_comes_at_once_at_the_end_with_what_was_asked(alone):
    for (name, _), (token_ids, logprobs, reason) in alone.items():
        params = PARAMS[name]
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert [first.token_id for first, *_ in logprobs] == list(token_ids)
        for first, *others in logprobs:
            assert len(others) in (params.logprobs, params.logprobs - (first.rank <= 3))
        assert (reason is FinishReason.LENGTH) is (len(token_ids) == params.max_tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"block_size": 8, "max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
    ],
    ids=["budget for few", "small blocks", "nothing cached"],
)
def test_neighbours_and_chunks_change_nothing(options, make_beam_driver, asks, alone):
    driver = make_beam_driver(**options)
    driver.add_all(asks)
    driver.add("greedy", asks[0][0], SamplingParams(temperature=0, max_tokens=30))
    driver.run()
    assert answers_of(driver, asks) == alone
    assert driver.counts["blocks copied"] > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [False, True], ids=["cold", "cached"])
def test_too_few_blocks_for_all_change_nothing(
    policy, mode, caching, make_beam_driver, asks, alone
):
    driver = make_beam_driver(
        block_size=8,
        num_kv_blocks=43,
        swap_space_bytes=1 << 20 if mode == "swap" else 0,
        preemption_mode=mode,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24,
    )
    for index, (prompt, params) in enumerate(asks):
        driver.add(str(index), prompt, params, tenant=str(index), priority=-index)
    driver.run()
    assert answers_of(driver, asks) == alone
    assert driver.engine.stats().num_preemptions_total > 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beams_made_to_make_room_at_any_time_change_nothing(mode, make_beam_driver, asks, alone):
    driver = make_beam_driver(
        swap_space_bytes=1 << 20, preemption_mode=mode, max_num_batched_tokens=24
    )
    driver.add_all(asks)
    steps = iter(range(10_000))

    def disturb():
        step, running = next(steps), driver.scheduler.running
        if running and step % 2 == 0:
            driver.preempt(running[step * 7 % len(running)])

    driver.run(disturb)
    assert answers_of(driver, asks) == alone
    assert driver.engine.stats().num_preemptions_total > 20


def test_a_cached_prompt_changes_nothing(make_beam_driver, asks, alone):
    driver = make_beam_driver()
    driver.add_all(asks, prefix="before ")
    driver.run()
    driver.add_all(asks)
    driver.run()
    assert answers_of(driver, asks) == alone
    assert driver.num_hit_tokens > 64


def test_beams_share_blocks_until_they_write(make_beam_driver, make_prompts):
    driver = make_beam_driver(block_size=8)
    (prompt,) = make_prompts([160])
    driver.add("a", prompt, SamplingParams(beam_width=8, max_tokens=9))
    most = 0
    while driver.engine.has_unfinished:
        driver.step()
        stats = driver.engine.stats()
        most = max(most, stats.num_blocks - stats.num_free_blocks)
    assert most <= 20 + 2 * 8, "the prompt is held once"
    assert driver.engine.stats().num_free_blocks == driver.engine.stats().num_blocks


def test_the_prompt_of_beams_is_told_of_once(make_beam_driver, asks):
    driver = make_beam_driver(max_num_batched_tokens=16)
    prompt, _ = asks[1]
    driver.add("a", prompt, SamplingParams(n=2, beam_width=3, max_tokens=4, prompt_logprobs=1))
    driver.run()
    *told, best = driver.outputs["a", 0]
    places = [place for output in told for place in output.prompt_logprobs]
    assert [first.token_id for first, *_ in places] == prompt[1:]
    assert len(best.token_ids) == 4
    assert [len(output.token_ids) for output in driver.outputs["a", 1]] == [4]


def test_an_abort_in_the_middle_frees_all(make_beam_driver, asks):
    driver = make_beam_driver(max_num_batched_tokens=16)
    for num_steps in range(1, 16):
        name = str(num_steps)
        driver.add(name, *asks[1])
        for _ in range(num_steps):
            driver.step()
        driver.engine.abort(name, index=None if num_steps % 2 else 1)
        assert not driver.engine.has_unfinished
        assert driver.outputs[name, 0] == []
        driver.run()


def test_a_deadline_ends_all_answers_without_tokens(make_beam_driver, asks):
    driver = make_beam_driver()
    driver.add("a", *asks[0], deadline_s=6)
    driver.run()
    for index in range(3):
        (output,) = driver.outputs["a", index]
        assert (output.token_ids, output.finish_reason) == ((), FinishReason.DEADLINE)


def test_beams_that_could_not_fit_in_at_once_are_refused_or_end_early(make_beam_driver):
    driver = make_beam_driver(block_size=8, num_kv_blocks=20)
    params = SamplingParams(beam_width=4, max_tokens=100, ignore_eos=True)
    driver.add("a", list(range(20)), params)
    driver.run()
    (output,) = driver.outputs["a", 0]
    assert len(output.token_ids) == 31 - 20  # 19 blocks, 4 each, less a token
    assert output.finish_reason is FinishReason.LENGTH
    message = (
        "^prompt has 31 tokens but each of 4 beams can hold 31 with its output; "
        "shorten it, lower beam_width or raise num_kv_blocks$"
    )
    with pytest.raises(PromptTooLong, match=message):
        driver.add("b", list(range(31)), params)
    with pytest.raises(InvalidRequest, match=r"^beam_width is 17 but max_num_seqs is 16; lower it"):
        driver.add("c", [1], SamplingParams(beam_width=17))
    assert not driver.engine.has_unfinished


def test_steps_ahead_change_nothing(checkpoints, make_beam_driver, asks, alone):
    driver = make_beam_driver(max_num_batched_tokens=32)
    driver.runner.steps_ahead = 1
    driver.add_all(asks)
    driver.add("greedy", asks[0][0], SamplingParams(temperature=0, max_tokens=60))
    driver.run()
    assert answers_of(driver, asks) == alone
