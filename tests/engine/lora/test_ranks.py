"""Ranks divide adapters as they divide the model."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from octavo.adapter import AdapterArrival
from octavo.config import EngineConfig
from octavo.errors import EngineError
from octavo.executor.parallel.adapter_reports import AdapterReporter, AdapterReports
from octavo.executor.parallel.rank_zero import RankZero
from octavo.sampling_params import SamplingParams

NAMES = [None, "everywhere", "some", "mlp"]


@pytest.mark.parametrize(
    ("tp", "pp", "max_loras"), [(2, 1, None), (2, 1, 1), (1, 2, 2)], ids=["tp2", "tp2 cold", "pp2"]
)
def test_several_ranks_answer_with_adapters_as_one_does(
    tp, pp, max_loras, adapters, checkpoints, drive, make_driver, make_prompts
):
    """Of some of them not all are in memory at once."""
    options = {
        "enable_lora": True,
        "multi_lora": str(adapters),
        "dtype": "float32",
        "num_kv_blocks": 256,
        "swap_space_bytes": 0,
        "max_num_batched_tokens": 64,
    }
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    limits = {"max_loras": max_loras, "cpu_threads": 2}
    config = EngineConfig(str(checkpoints["llama"]), **limits, **options, **sizes)
    runner = RankZero(config)
    try:
        ranks = drive(config, runner, 256, 0)
        one_rank = make_driver("llama", **options)
        asks = [
            (prompt, SamplingParams(temperature=0, max_tokens=8, logprobs=0, lora_name=name))
            for prompt in make_prompts([20, 70])
            for name in NAMES
        ]
        for driver in (ranks, one_rank):
            driver.add_all(asks)
            driver.run()
        for index, (prompt, params) in enumerate(asks):
            name, alone = str(index), f"{index} alone"
            ranks.add(alone, prompt, params, cache_salt=alone)
            ranks.run()
            assert ranks.trace(name) == ranks.trace(alone), params.lora_name
            assert ranks.tokens(name) == one_rank.tokens(name), params.lora_name
            if tp == 1:
                assert ranks.trace(name) == one_rank.trace(name), params.lora_name
        num_loads = ranks.engine.stats().num_adapter_loads_total
        assert num_loads == 0 if max_loras is None else num_loads > 0
    finally:
        runner.close()


def test_an_adapter_that_one_rank_cannot_read_has_not_come():
    """Rank zero tells when all have, in the order of the loads, and of the first fault."""
    store = HashStore()
    reports = AdapterReports(store, num_ranks=3)
    first, second = (AdapterReporter(store, rank) for rank in (1, 2))
    good, bad, own = AdapterArrival(4), AdapterArrival(5), EngineError("gone here")
    assert reports.pop(0.0) == ()
    reports.own.put(good)
    first.tell(good)
    assert reports.pop(0.002) == ()
    second.tell(good)
    first.tell(bad._replace(error=EngineError("gone there")))
    reports.own.put(bad)
    assert reports.pop(0.0) == (good,)
    second.tell(bad)
    ((number, error),) = reports.pop(0.0)
    assert (number, str(error)) == (5, "gone there")
    for rank in (first, second):
        rank.tell(bad)
    reports.own.put(AdapterArrival(5, own))
    assert reports.pop(0.0) == (AdapterArrival(5, own),)
    assert store.num_keys() == 0
