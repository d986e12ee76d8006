"""Every native family answers on several ranks as on one, and the demo model in bfloat16 nearly."""

from __future__ import annotations

from contextlib import closing

import pytest

from octavo.executor.model_runner import ModelRunner
from octavo.executor.parallel.rank_zero import RankZero
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, seed=0)


@pytest.fixture
def answer(drive, make_prompts):
    """Return the traces of some answers of a runner."""

    def run(config, runner) -> list:
        driver = drive(config, runner, runner.num_blocks, runner.num_host_blocks)
        driver.add_all([(prompt, GREEDY) for prompt in make_prompts([5, 64, 33, 90])])
        driver.run()
        return [driver.trace(f"{index}") for index in range(4)]

    return run


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [("mistral", 2, 2), ("qwen2", 2, 2), ("qwen3", 2, 2), ("llama", 6, 1)],
)
def test_tiny_models_say_the_same(family, tp, pp, make_options, answer):
    one = make_options(family)
    expected = answer(one, ModelRunner(one))
    several = make_options(family, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    with closing(RankZero(several)) as ranks:
        traces = answer(one, ranks)
    for trace, other in zip(traces, expected, strict=True):
        assert [token_id for token_id, _ in trace] == [token_id for token_id, _ in other]


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_the_demo_model_says_nearly_the_same(tp, pp, make_options, answer):
    one = make_options("demo")
    expected = answer(one, ModelRunner(one))
    several = make_options("demo", tensor_parallel_size=tp, pipeline_parallel_size=pp)
    with closing(RankZero(several)) as ranks:
        traces = answer(one, ranks)
    if tp == 1:
        assert traces == expected
    for trace, other in zip(traces, expected, strict=True):
        # From the first token on that differs, the answers tell of different things.
        (_, ((_, mine, _), *_)), (_, ((_, theirs, _), *_)) = trace[0], other[0]
        assert mine == pytest.approx(theirs, abs=0.1)
