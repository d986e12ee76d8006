"""Models of transformers over paged KV say what transformers says, to the token and to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams

LENGTHS = [1, 5, 23, 60, 90]
NUM_TOKENS = 8

# Odd sizes on purpose: nothing is a multiple of a vector or of another size by accident.
BASE = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 106,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
GROUPED = {**BASE, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 14}
SLIDING = {
    "sliding_window": 30,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
OLD_NAMES = {
    "vocab_size": 331,
    "n_embd": 60,
    "n_head": 6,
    "n_layer": 3,
    "n_positions": 128,
    "n_inner": 106,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": GROUPED,
    "biogpt": BASE,
    "bitnet": GROUPED,
    "codegen": {**OLD_NAMES, "n_embd": 56, "n_head": 4, "rotary_dim": 6},
    "cohere": {**GROUPED, "use_qk_norm": True},
    "cohere2": {**WIDE, **SLIDING},
    "ctrl": {
        "vocab_size": 331,
        "n_positions": 128,
        "n_embd": 60,
        "dff": 106,
        "n_layer": 3,
        "n_head": 6,
    },
    "cwm": {**WIDE, **SLIDING},
    "ernie4_5": WIDE,
    "exaone4": {**WIDE, **SLIDING},
    "gemma2": {**WIDE, **SLIDING, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
    "glm": WIDE,
    "glm4": WIDE,
    "gpt2": OLD_NAMES,
    "gpt_bigcode": OLD_NAMES,
    "gpt_neox": {**BASE, "rotary_pct": 0.4},
    "gpt_oss": {**WIDE, **SLIDING, **EXPERTS, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    "gptj": {**OLD_NAMES, "rotary_dim": 4},
    "granite_swa": {**GROUPED, **SLIDING},
    "helium": {**GROUPED, "head_dim": 10},
    "hunyuan_v1_dense": WIDE,
    "jais2": WIDE,
    "mixtral": {**GROUPED, **EXPERTS},
    "ministral3": {
        **WIDE,
        "rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
    },
    "modernbert-decoder": {**BASE, "local_attention": 30, "global_attn_every_n_layers": 2},
    "nanochat": GROUPED,
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "opt": {**BASE, "ffn_dim": 106, "word_embed_proj_dim": 52},
    "persimmon": {**BASE, "hidden_size": 48, "partial_rotary_factor": 0.5},
    "phi": {**GROUPED, "partial_rotary_factor": 0.4},
    "qwen3_moe": {**WIDE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 30},
    "seed_oss": WIDE,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": 30},
    "vaultgemma": {**WIDE, **SLIDING, "attn_logit_softcapping": 3.0},
}


@pytest.fixture
def make_model(tmp_path):
    """Save a tiny random model of a type; return (directory, the model)."""

    def make(model_type: str, **fields: Any):
        torch.manual_seed(len(model_type))
        tokens = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
        config = AutoConfig.for_model(model_type, **tokens, **fields)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
        for parameter in model.parameters():
            # Fresh weights are so small that every logit is nearly the same, fresh biases are zero
            # and fresh norms one: whoever forgot them would pass.
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(tmp_path / model_type)
        return tmp_path / model_type, model.eval()

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


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_it_says_what_transformers_says_in_chunks_and_batches_and_preempted(
    model_type, make_model, make_prompts, drive
):
    directory, model = make_model(model_type, **ARCHITECTURES[model_type])
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
