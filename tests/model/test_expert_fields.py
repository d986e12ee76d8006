"""What configs say of experts."""

import pytest
import transformers

from octavo.errors import ConfigError
from octavo.model.families import spec_from_config
from octavo.model.spec import ExpertSpec
from octavo.model.tensor_names import expected_tensors

# As on the hub, written by transformers 4.
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_configs_of_transformers_4_are_read():
    assert spec_from_config(MIXTRAL).experts == ExpertSpec(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=14336,
        normalizes_weights=True,
        layers=(True,) * 32,
        stored="block_sparse_moe",
    )
    assert spec_from_config(QWEN3_MOE).experts == ExpertSpec(
        num_experts=128,
        experts_per_token=8,
        intermediate_size=768,
        normalizes_weights=True,
        layers=(True,) * 48,
    )


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(),
        transformers.Qwen3MoeConfig(),
        transformers.OlmoeConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_config_object_of_transformers_5_reads_as_its_json(config):
    spec = spec_from_config(config)
    assert spec == spec_from_config(config.to_diff_dict())
    assert spec.experts.num_experts == config.num_local_experts
    assert spec.experts.experts_per_token == config.num_experts_per_tok


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3, 9]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
    ],
)
def test_layers_without_experts_have_an_mlp(change, layers):
    spec = spec_from_config({**QWEN3_MOE, "num_hidden_layers": 4, **change})
    assert spec.experts.layers == layers
    tensors = expected_tensors(spec)
    for index, has_experts in enumerate(layers):
        mlp = f"model.layers.{index}.mlp."
        assert (f"{mlp}gate.weight" in tensors) == has_experts
        assert (f"{mlp}experts.127.down_proj.weight" in tensors) == has_experts
        assert (f"{mlp}down_proj.weight" in tensors) == (not has_experts)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            MIXTRAL,
            {"num_experts_per_tok": 9},
            "num_experts_per_tok = 9 but must have at most the 8",
        ),
        (MIXTRAL, {"num_experts": 4}, "num_local_experts = 8 but must have num_experts, 4"),
        (QWEN3_MOE, {"num_experts": 2**17}, "num_experts = 131072 but must have at most 2,730"),
        (MIXTRAL, {"num_local_experts": None}, "no num_experts, which is needed"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "no moe_intermediate_size"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob = 1 but must have true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 but must have a positive"),
        (QWEN3_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers = ['0'] but must have a list of"),
        (
            QWEN3_MOE,
            {"shared_expert_intermediate_size": 512},
            "shared_expert_intermediate_size = 512, which is not understood",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, change, message):
    with pytest.raises(ConfigError) as error:
        spec_from_config({**config, **change})
    assert message in str(error.value)


def test_olmoe_that_clips_is_refused_by_name():
    config = transformers.OlmoeConfig(clip_qkv=8.0)
    with pytest.raises(ConfigError, match=r"clip_qkv = 8\.0, which is not understood"):
        spec_from_config(config)
