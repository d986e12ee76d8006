"""Ranks of which several hold the same KV head answer as one rank does."""

from __future__ import annotations

from contextlib import closing

from octavo.executor.model_runner import ModelRunner
from octavo.executor.parallel.rank_zero import RankZero
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, seed=0)


def test_six_ranks_share_two_kv_heads(make_options, make_prompts, drive):
    one = make_options()
    several = make_options(tensor_parallel_size=6)
    with closing(RankZero(several)) as ranks:
        drivers = []
        for config, runner in ((one, ModelRunner(one)), (several, ranks)):
            driver = drive(config, runner, runner.num_blocks, runner.num_host_blocks)
            driver.add_all([(prompt, GREEDY) for prompt in make_prompts([5, 64, 33, 90])])
            driver.run()
            drivers.append(driver)
    ours, theirs = drivers
    assert [ours.tokens(name) for name in "0123"] == [theirs.tokens(name) for name in "0123"]
