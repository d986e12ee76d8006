"""A request's tokens and log-probabilities are the same to the bit, whatever happens around it."""

from __future__ import annotations

import pytest

from octavo.sampling_params import SamplingParams

LENGTHS = [70, 5, 33, 16, 120, 1, 47, 64]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, return_logprob=True)
SEEDED = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=50,
    seed=11,
    max_tokens=20,
    ignore_eos=True,
    return_logprob=True,
)

CASES = [
    pytest.param("llama", "float32", id="llama-float32"),
    pytest.param("llama", "bfloat16", id="llama-bfloat16"),
    pytest.param("qwen3", "float32", id="qwen3-float32"),
    pytest.param("mistral", "bfloat16", id="mistral-window-bfloat16"),
    pytest.param("demo", "bfloat16", id="demo-bfloat16"),
    pytest.param("demo", "float32", id="demo-float32"),
]


@pytest.fixture(scope="module")
def alone():
    """Traces of each (model, dtype) run one request at a time, filled on first use."""
    return {}


@pytest.fixture
def traces_alone(alone, make_driver, make_prompts):
    def get(name: str, dtype: str) -> list[list[tuple[int, float]]]:
        if (name, dtype) not in alone:
            driver = make_driver(name, dtype=dtype, max_model_len=512)
            for index, prompt in enumerate(make_prompts(LENGTHS)):
                driver.add(str(index), prompt, _params(index))
                driver.run()
            alone[name, dtype] = [driver.trace(str(i)) for i in range(len(LENGTHS))]
        return alone[name, dtype]

    return get


def _params(index: int) -> SamplingParams:
    return SEEDED if index % 2 else GREEDY


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_request_in_a_batch_of_32_answers_as_it_does_alone(
    name, dtype, traces_alone, make_driver, make_prompts
):
    driver = make_driver(name, dtype=dtype, max_model_len=512, max_num_seqs=32)
    prompts = make_prompts(LENGTHS)
    for index in range(32):
        place = index % len(LENGTHS)
        driver.add(str(index), prompts[place], _params(place))
    driver.run()
    for index in range(32):
        assert driver.trace(str(index)) == traces_alone(name, dtype)[index % len(LENGTHS)], index


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunk_and_block_sizes_do_not_change_an_answer(
    name, dtype, chunk, block_size, traces_alone, make_driver, make_prompts
):
    driver = make_driver(
        name,
        dtype=dtype,
        max_model_len=512,
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
    )
    for index, prompt in enumerate(make_prompts(LENGTHS)):
        driver.add(str(index), prompt, _params(index))
    driver.run()
    for index in range(len(LENGTHS)):
        assert driver.trace(str(index)) == traces_alone(name, dtype)[index], index


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_sequence_preempted_at_every_kth_token_emits_the_same_tokens(
    name, dtype, every, traces_alone, make_driver, make_prompts
):
    driver = make_driver(
        name, dtype=dtype, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=8
    )
    for index, prompt in enumerate(make_prompts(LENGTHS)):
        driver.add(str(index), prompt, _params(index))
    preempted_at: set[tuple[str, int]] = set()
    scheduler = driver.engine.scheduler
    while driver.engine.has_unfinished:
        driver.step()
        for sequence in reversed(scheduler.running):
            mark = (sequence.request_id, sequence.num_output_tokens)
            is_due = sequence.num_output_tokens % every == 0 and sequence.num_output_tokens
            if is_due and mark not in preempted_at:
                preempted_at.add(mark)
                scheduler.preempt(sequence)
    assert len(preempted_at) == len(LENGTHS) * len(range(every, 20, every))
    for index in range(len(LENGTHS)):
        assert driver.trace(str(index)) == traces_alone(name, dtype)[index], index


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_pool_too_small_for_all_gives_the_same_answers(
    name, dtype, traces_alone, make_driver, make_prompts
):
    driver = make_driver(name, dtype=dtype, max_model_len=512, num_kv_blocks=14)
    for index, prompt in enumerate(make_prompts(LENGTHS)):
        driver.add(str(index), prompt, _params(index))
    driver.run()
    assert driver.engine.stats().num_preemptions_total > 0
    for index in range(len(LENGTHS)):
        assert driver.trace(str(index)) == traces_alone(name, dtype)[index], index


def test_the_comparison_can_fail(traces_alone, make_driver, make_prompts):
    driver = make_driver("llama", dtype="float32", max_model_len=512)
    prompt = make_prompts(LENGTHS)[0]
    driver.add("changed", [*prompt[:10], prompt[10] + 1, *prompt[11:]], _params(0))
    driver.run()
    assert driver.trace("changed") != traces_alone("llama", "float32")[0]
