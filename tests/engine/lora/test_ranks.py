"""Ranks divide adapters as they divide the model."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.executor.parallel.rank_zero import RankZero
from octavo.sampling_params import SamplingParams

NAMES = [None, "everywhere", "some", "mlp"]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_several_ranks_answer_with_adapters_as_one_does(
    tp, pp, adapters, checkpoints, drive, make_driver, make_prompts
):
    options = {
        "enable_lora": True,
        "multi_lora": str(adapters),
        "dtype": "float32",
        "num_kv_blocks": 256,
        "swap_space_bytes": 0,
        "max_num_batched_tokens": 64,
    }
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = EngineConfig(str(checkpoints["llama"]), cpu_threads=2, **options, **sizes)
    runner = RankZero(config)
    try:
        together, alone = (drive(config, runner, 256, 0) for _ in range(2))
        one_rank = make_driver("llama", **options)
        asks = [
            (prompt, SamplingParams(temperature=0, max_tokens=8, logprobs=0, lora_name=name))
            for prompt in make_prompts([20, 70])
            for name in NAMES
        ]
        for driver in (together, one_rank):
            driver.add_all(asks)
            driver.run()
        for index, (prompt, params) in enumerate(asks):
            name = str(index)
            alone.add(name, prompt, params)
            alone.run()
            assert together.trace(name) == alone.trace(name), params.lora_name
            assert together.tokens(name) == one_rank.tokens(name), params.lora_name
            if tp == 1:
                assert together.trace(name) == one_rank.trace(name), params.lora_name
    finally:
        runner.close()
