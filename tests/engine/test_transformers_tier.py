"""Models of transformers over paged KV say what transformers says, to the token and to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.tiny_models import PAGED, save_paged

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams

LENGTHS = [1, 5, 23, 60, 90]
NUM_TOKENS = 8


@pytest.fixture
def make_model(tmp_path):
    """Save a tiny random model of a type; return (directory, the model)."""

    def make(model_type: str, **fields: Any):
        return tmp_path / model_type, save_paged(model_type, tmp_path / model_type, **fields)

    return make


def generate_with_transformers(model, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", PAGED)
def test_it_says_what_transformers_says_in_chunks_and_batches_and_preempted(
    model_type, make_model, make_prompts, drive
):
    directory, model = make_model(model_type, **PAGED[model_type])
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_prefix_caching": False}
    options |= {"num_kv_blocks": 32, "swap_space_bytes": 0, "cpu_threads": 1}
    config = EngineConfig(str(directory), model_impl="transformers", **options)
    runner = ModelRunner(config)
    prompts = make_prompts(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0)

    together = drive(config, runner, num_blocks=32, num_host_blocks=0)
    together.add_all([(prompt, params) for prompt in prompts])

    def preempt_now_and_then() -> None:
        if together.now_s in (5, 8):
            together.preempt(together.scheduler.running[-1])

    together.run(between_steps=preempt_now_and_then)
    assert together.counts["chunks"] > 0
    assert together.engine.stats().num_preemptions_total == 2

    alone = drive(config, runner, num_blocks=32, num_host_blocks=0)
    for index, prompt in enumerate(prompts):
        alone.add(str(index), prompt, params)
        alone.run()
        assert together.trace(str(index)) == alone.trace(str(index)), index
        assert together.tokens(str(index)) == generate_with_transformers(model, prompt), index
