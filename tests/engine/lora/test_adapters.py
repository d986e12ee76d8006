"""Requests with different adapters share a batch, and each is answered as if it were alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.model.checkpoint import Checkpoint
from octavo.model.loader import load_model
from octavo.sampling_params import SamplingParams
from octavo.static_engine.engine import StaticEngine

NAMES = [None, "everywhere", "some", "mlp"]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
#: Separate and joined projections, norms before and after, experts beside adapted attention.
FAMILIES = ["llama", "phi3", "gemma2", "qwen3_moe"]
LENGTHS = [1, 17, 40, 3, 64, 33, 16, 90]


@torch.inference_mode()
def best_tokens(model, prompt: list[int], answer: list[int]) -> list[int]:
    """Return what a greedy answer would have in the place of each token, after those before."""
    logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_with_the_adapter_merged(
    family, make_adapters, merge, make_driver, make_prompts
):
    listed = make_adapters(family)
    options = {"enable_lora": True, "multi_lora": str(listed), "max_num_batched_tokens": 48}
    driver = make_driver(family, dtype="float32", cpu_threads=1, max_num_seqs=16, **options)
    prompts = make_prompts(LENGTHS)
    for index, prompt in enumerate(prompts):
        for name in NAMES:
            driver.add(f"{name} {index}", prompt, replace(GREEDY, lora_name=name))
    driver.run()
    traces = set()
    for name in NAMES:
        model = merge(family, listed, name)
        for index, prompt in enumerate(prompts):
            tokens = driver.tokens(f"{name} {index}")
            assert tokens == best_tokens(model, prompt, tokens), (name, index)
            traces.add(tuple(driver.trace(f"{name} {index}")))
    assert len(traces) == 4 * len(prompts), "each adapter changes what is likely"


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=["float32", "bfloat16", "int8"],
)
def test_neighbours_change_no_bit(options, adapters, make_driver, make_prompts):
    options = {"cpu_threads": 1, **options}
    values = {"enable_lora": True, "multi_lora": str(adapters), **options}
    together = make_driver("llama", max_num_batched_tokens=48, max_num_seqs=16, **values)
    alone = make_driver("llama", max_num_batched_tokens=512, **values)
    plain = make_driver("llama", max_num_batched_tokens=512, **options)
    asks = [
        (prompt, SamplingParams(seed=index, max_tokens=NUM_TOKENS, logprobs=2, lora_name=name))
        for index, prompt in enumerate(make_prompts(LENGTHS[:4]))
        for name in NAMES
    ]
    together.add_all(asks)
    together.run()
    assert together.counts["most rows"] > 8
    for index, (prompt, params) in enumerate(asks):
        driver = plain if params.lora_name is None else alone
        driver.add(str(index), prompt, params)
        driver.run()
        assert together.trace(str(index)) == driver.trace(str(index)), params.lora_name


def test_whatever_befalls_a_request_its_adapter_stays(adapters, make_driver, make_prompts, drive):
    """Forks, beams, scored prompts, preemption by swap and by recomputation, few blocks."""
    values = {"enable_lora": True, "multi_lora": str(adapters), "dtype": "float32"}
    roomy = make_driver("llama", swap_space_bytes=8 << 20, **values)
    tight = drive(roomy.engine.config, roomy.runner, num_blocks=24, num_host_blocks=16)
    asks = [
        (prompt, SamplingParams(max_tokens=16, logprobs=1, lora_name=name, **params))
        for prompt, name in zip(make_prompts([40, 70, 33, 20, 50]), [*NAMES, "some"], strict=True)
        for params in (
            {"n": 3, "seed": 5},
            {"beam_width": 2, "n": 2},
            {"temperature": 0, "prompt_logprobs": 2},
        )
    ]
    for driver in (roomy, tight):
        driver.add_all(asks)

    def disturb() -> None:
        if tight.scheduler.running and tight.now_s % 3 == 0:
            tight.preempt(tight.scheduler.running[-1])

    roomy.run()
    tight.run(disturb)
    assert tight.counts["blocks out"] > 0
    assert tight.counts["forks"] > 0
    for index, (_, params) in enumerate(asks):
        for answer in range(params.n):
            name = str(index)
            assert tight.trace(name, answer) == roomy.trace(name, answer), (params, answer)
        if params.prompt_logprobs is not None:
            assert tight.prompt_logprobs(name) == roomy.prompt_logprobs(name), params


def test_prefixes_are_reused_by_the_same_adapter_only(adapters, make_driver, make_prompts):
    driver = make_driver("llama", enable_lora=True, multi_lora=str(adapters))
    (prompt,) = make_prompts([80])
    hits = []
    for index, name in enumerate(["some", "mlp", None, "some", None]):
        before = driver.num_hit_tokens
        driver.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=2, lora_name=name))
        driver.run()
        hits.append(driver.num_hit_tokens - before)
    assert hits == [0, 0, 0, 64, 64]


def test_two_names_of_the_same_files_share_prefixes(adapters, make_driver, make_prompts, tmp_path):
    listed = tmp_path / "multi_lora.json"
    listed.write_text(
        json.dumps({"a": str(adapters.parent / "some"), "b": str(adapters.parent / "some")})
    )
    driver = make_driver("llama", enable_lora=True, multi_lora=str(listed))
    (prompt,) = make_prompts([80])
    for name in ("a", "b"):
        driver.add(name, prompt, SamplingParams(seed=0, max_tokens=4, logprobs=1, lora_name=name))
        driver.run()
    assert driver.num_hit_tokens == 64
    assert driver.trace("a") == driver.trace("b")


def test_an_unknown_name_ends_no_other_request(adapters, make_driver, make_prompts):
    driver = make_driver("llama", enable_lora=True, multi_lora=str(adapters))
    (prompt,) = make_prompts([5])
    driver.add("good", prompt, SamplingParams(temperature=0, max_tokens=3, lora_name="mlp"))
    message = r"^lora_name is 'gone' but must be one of 'everywhere', 'mlp', 'some'$"
    with pytest.raises(InvalidRequest, match=message):
        driver.add("bad", prompt, SamplingParams(max_tokens=3, lora_name="gone"))
    driver.run()
    assert len(driver.tokens("good")) == 3


def test_a_model_without_adapters_says_so(make_driver):
    driver = make_driver("llama")
    with pytest.raises(InvalidRequest, match=r"loaded without adapters \(option enable_lora\)$"):
        driver.add("a", [1, 2], SamplingParams(lora_name="mlp"))


def test_a_bad_list_ends_the_load_before_any_weights_are_read(
    checkpoints, adapters, tmp_path, monkeypatch
):
    class WeightsRead(Exception):
        pass

    def tensor(*_: object) -> torch.Tensor:
        raise WeightsRead

    def load(listed: dict[str, str]) -> None:
        path = tmp_path / "multi_lora.json"
        path.write_text(json.dumps(listed))
        options = {"device": "cpu", "enable_lora": True, "multi_lora": str(path)}
        load_model(EngineConfig(str(checkpoints["llama"]), **options))

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    good, empty = str(adapters.parent / "mlp"), tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has adapter 'gone' in .*, no directory$"):
        load({"good": good, "gone": "gone"})
    with pytest.raises(ConfigError, match=r"^adapter 'empty': .*adapter_model\.safetensors"):
        load({"good": good, "empty": str(empty)})
    with pytest.raises(WeightsRead):
        load({"good": good})


def test_a_model_that_is_not_paged_takes_no_adapters(checkpoints):
    message = r"^option enable_lora is True but must be False in the traditional mode"
    with pytest.raises(ConfigError, match=message):
        StaticEngine.load(EngineConfig(str(checkpoints["llama"]), enable_lora=True))
