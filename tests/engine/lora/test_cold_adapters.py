"""Adapters that are on disk until a request wants them: answers are the same to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import EngineError
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams

NAMES = ["everywhere", "some", "mlp", None]
GONE = (
    "the files of adapter 'mlp' are gone or have changed since the model was loaded; load the "
    "model again"
)


@pytest.fixture
def own_adapters(adapters, tmp_path) -> Path:
    """A list of copies of the adapters, which a test may damage."""
    shutil.copytree(adapters.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / adapters.name


@pytest.fixture
def make(make_driver):
    """Make a driver over the tiny llama with a list of adapters, so many of them in memory."""

    def build(listed: Path, max_loras: int | None, **options):
        values = {"enable_lora": True, "multi_lora": str(listed), "dtype": "float32", **options}
        return make_driver("llama", max_loras=max_loras, cpu_threads=1, **values)

    return build


def test_bits_do_not_depend_on_what_is_in_memory(adapters, make, make_prompts):
    """One slot for three adapters, requests of all kinds, and few blocks."""
    asks = [
        (prompt, SamplingParams(max_tokens=6, logprobs=2, lora_name=name, **params))
        for prompt in make_prompts([40, 3, 21])
        for name in NAMES
        for params in ({"seed": 1}, {"seed": 2, "n": 2}, {"beam_width": 2})
    ]
    options = {"num_kv_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    whole, *others = (make(adapters, max_loras, **options) for max_loras in (None, 1, 2))
    whole.add_all(asks)
    whole.run()
    for num_slots, driver in enumerate(others, start=1):
        driver.add_all(asks)
        driver.run()
        for index, (_, params) in enumerate(asks):
            for answer in range(params.n):
                name = str(index)
                assert driver.trace(name, answer) == whole.trace(name, answer), (params, answer)
        stats = driver.engine.stats()
        assert stats.num_resident_adapters == num_slots
        assert stats.num_adapter_loads_total >= 3 - num_slots
        assert stats.adapter_wait_s_total > 0
    stats = whole.engine.stats()
    assert (stats.num_resident_adapters, stats.num_adapter_loads_total) == (3, 0)


def test_prefixes_of_an_adapter_outlive_its_time_in_memory(adapters, make, make_prompts):
    driver = make(adapters, 1)
    (prompt,) = make_prompts([80])
    hits = []
    for index, name in enumerate(["mlp", "some", "mlp"]):
        before = driver.num_hit_tokens
        driver.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=2, lora_name=name))
        driver.run()
        hits.append(driver.num_hit_tokens - before)
    assert hits == [0, 0, 64]


@pytest.mark.parametrize("fault", ["gone", "other weights", "other config", "damaged"])
def test_an_adapter_that_is_not_what_it_was_ends_only_those_who_want_it(
    fault, own_adapters, make, make_prompts
):
    """Until it is as it was again."""
    driver = make(own_adapters, 1)
    folder = own_adapters.parent / "mlp"
    kept = shutil.copytree(folder, own_adapters.parent / "kept")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if fault == "gone":
        shutil.rmtree(folder)
    elif fault == "other weights":
        data = bytearray(weights.read_bytes())
        data[-2] ^= 1
        weights.write_bytes(data)
    elif fault == "other config":
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 2}))
    else:
        weights.write_bytes(weights.read_bytes()[:-4])
    prompts = make_prompts([9, 12, 20])
    for name, prompt in zip(["mlp", "everywhere", None], prompts, strict=True):
        driver.add(str(name), prompt, SamplingParams(max_tokens=5, seed=1, lora_name=name))
    driver.run()
    (last,) = driver.outputs["mlp", 0]
    assert (last.finish_reason, type(last.error), str(last.error)) == (
        *(FinishReason.ERROR, EngineError),
        GONE,
    )
    assert [len(driver.tokens(name)) for name in ("everywhere", "None")] == [5, 5]
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    driver.add("again", prompts[0], SamplingParams(max_tokens=5, lora_name="mlp"))
    driver.run()
    assert len(driver.tokens("again")) == 5
    stats = driver.engine.stats()
    assert (stats.num_adapter_loads_total, stats.num_failed_adapter_loads_total) == (2, 1)


def test_who_is_cancelled_or_too_late_while_it_waits_for_an_adapter_leaves_nothing(
    adapters, make, make_prompts
):
    driver = make(adapters, 1)
    first, second = make_prompts([9, 12])
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, lora_name="everywhere")
    driver.add("hot", first, params)
    driver.step()
    cold = replace(params, lora_name="mlp")
    driver.add("late", second, cold, deadline_s=driver.now_s + 3)
    driver.add("cancelled", second, cold)
    driver.step()
    driver.abort("cancelled")
    driver.run()
    (last,) = driver.outputs["late", 0]
    assert (last.finish_reason, last.token_ids) == (FinishReason.DEADLINE, ())
    assert driver.outputs["cancelled", 0] == []
    assert len(driver.tokens("hot")) == 20
    assert driver.engine.stats().num_adapter_loads_total == 0
