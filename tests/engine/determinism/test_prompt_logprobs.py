"""A prompt is told of itself once, and in the same bits, whatever happens to its request."""

from __future__ import annotations

import pytest

from octavo.executor.prompt_scores import PIECE_ROWS
from octavo.sampling_params import SamplingParams
from octavo.sequence import SequenceStatus

MODELS = [("llama", "float32"), ("llama", "bfloat16"), ("mistral", "float32")]
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=2, seed=0
)


@pytest.fixture
def alone(make_prompts):
    """Return what each of some prompts is told of itself when nothing happens to it."""

    def run(model, prompts, params):
        driver = model.driver(enable_prefix_caching=False)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt, params)
            driver.run()
        return [driver.prompt_logprobs(str(index)) for index in range(len(prompts))]

    return run


@pytest.fixture(params=MODELS, ids="-".join)
def model(request, load_model):
    return load_model(*request.param)


@pytest.mark.parametrize("chunk", [1, 7, PIECE_ROWS, PIECE_ROWS + 1, 200])
def test_chunks_change_no_bit(model, alone, make_prompts, chunk):
    prompts = make_prompts([70, 5, 33, 100])
    driver = model.driver(max_num_batched_tokens=chunk, max_num_seqs=min(4, chunk))
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, PARAMS)
    driver.run()
    for index, expected in enumerate(alone(model, prompts, PARAMS)):
        assert driver.prompt_logprobs(str(index)) == expected
        assert len(expected) == len(prompts[index]) - 1


def test_a_prompt_that_is_cached_is_told_of_itself_all_the_same(model, alone, make_prompts):
    (prompt,) = make_prompts([70])
    driver = model.driver()
    driver.add("plain", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    driver.run()
    driver.add("scored", prompt, PARAMS)
    driver.run()
    assert driver.prompt_logprobs("scored") == alone(model, [prompt], PARAMS)[0]
    assert driver.num_hit_tokens == 0


def test_what_a_scored_prompt_has_computed_is_reused(model, make_prompts):
    (prompt,) = make_prompts([70])
    driver = model.driver()
    driver.add("scored", prompt, PARAMS)
    driver.run()
    driver.add("plain", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    driver.run()
    assert driver.num_hit_tokens == 64
    assert driver.tokens("plain") == driver.tokens("scored")


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("after", range(1, 9))
def test_who_makes_room_is_told_everything_once(
    model, alone, make_prompts, mode, after, steps_ahead
):
    (prompt,) = make_prompts([100])
    driver = model.driver(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_host_blocks=64,
        preemption_mode=mode,
        steps_ahead=steps_ahead,
    )
    driver.add("0", prompt, PARAMS)
    for _ in range(after):
        driver.step()
    (sequence,) = driver.scheduler.running
    driver.preempt(sequence)
    assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
    driver.run()
    assert driver.prompt_logprobs("0") == alone(model, [prompt], PARAMS)[0]
    assert driver.counts["tokens scored"] == len(prompt) - 1


def test_n_answers_tell_of_their_prompt_once(model, alone, make_prompts):
    (prompt,) = make_prompts([40])
    driver = model.driver(steps_ahead=1)
    driver.add("0", prompt, SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2))
    driver.run()
    assert driver.prompt_logprobs("0") == alone(model, [prompt], PARAMS)[0]
    later = driver.outputs["0", 1] + driver.outputs["0", 2]
    assert not any(output.prompt_logprobs for output in later)
    assert driver.counts["forks"] == 1


def test_who_did_not_ask_is_told_nothing(model, make_prompts):
    driver = model.driver()
    for name, params in (("a", PARAMS), ("b", SamplingParams(max_tokens=4, seed=3))):
        driver.add(name, make_prompts([40])[0], params)
    driver.run()
    assert all(not output.logprobs for output in driver.outputs["b", 0])
    assert driver.prompt_logprobs("b") == []
    assert driver.counts["tokens scored"] == 39


def test_one_that_is_aborted_is_told_nothing_more(model, make_prompts):
    driver = model.driver(max_num_batched_tokens=16, max_num_seqs=4, steps_ahead=1)
    driver.add("0", make_prompts([100])[0], PARAMS)
    driver.step()
    driver.step()
    driver.abort("0")
    outputs = driver.outputs["0", 0]
    before = len(outputs)
    driver.run()
    assert len(outputs) == before
