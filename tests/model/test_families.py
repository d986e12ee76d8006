"""Configs of each family as they are on the hub, and what of them is refused by name."""

from dataclasses import replace

import pytest
import torch
import transformers

from octavo.errors import ConfigError
from octavo.model.families import spec_from_config
from octavo.model.rope import RopeSpec, rotary_table
from octavo.model.spec import ModelSpec, NormSpec

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 240,
    "intermediate_size": 500,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0",
    "use_cache": True,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
PLAIN = ModelSpec(
    architecture="",
    vocab_size=1000,
    hidden_size=240,
    intermediate_size=500,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=60,
    max_position_embeddings=8192,
    norm=NormSpec("rms", 1e-5),
    ropes=(RopeSpec(60, 10_000.0),) * 4,
    windows=(None,) * 4,
    attention_scale=60**-0.5,
    tied_embeddings=False,
    eos_token_ids=(),
    dtype="bfloat16",
)

SMOLLM3 = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 4,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
# Phi 4 mini: fused, tied, partly rotated, extended, and with fields of its own code.
PHI4_MINI = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.1,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1, 2.5, 8], "short_factor": [1, 1, 1.5], "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
GEMMA = {
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 60,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-06,
}
GEMMA1 = {"model_type": "gemma", **GEMMA, "hidden_act": "gelu", "hidden_activation": None}
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA3 = {
    **GEMMA,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 100,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
}
GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 8.0,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
OLMO2 = {
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000,
}
OLMO3 = {
    **OLMO2,
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {
        "attention_factor": 1.2,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
}
STABLELM = {
    "model_type": "stablelm",
    "architectures": ["StableLmForCausalLM"],
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "layer_norm_eps": 1e-05,
    "partial_rotary_factor": 0.1,
    "qk_layernorm": False,
    "rope_scaling": None,
    "rope_theta": 10000,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
}

WIDE, NEAR = RopeSpec(60, 1e6, "linear", factor=8.0), RopeSpec(60, 10_000.0)
YARN = RopeSpec(60, 5e5, "yarn", factor=8.0, original_max_len=1024, attention_factor=1.2)
GEMMA_SPEC = replace(
    PLAIN,
    norm=NormSpec("rms", 1e-6, adds_one=True),
    tied_embeddings=True,
    activation="gelu",
    embedding_scale=240**0.5,
    rounds_embedding_scale=True,
)
OLMO_SPEC = replace(
    PLAIN,
    ropes=(RopeSpec(60, 5e5),) * 4,
    has_input_norms=False,
    has_output_norms=True,
    qk_norm="all",
)
SPECS = {
    "SmolLM3ForCausalLM": (
        SMOLLM3,
        replace(PLAIN, ropes=(*[RopeSpec(60, 5e6)] * 3, None), tied_embeddings=True),
    ),
    "Phi3ForCausalLM": (
        PHI4_MINI,
        replace(
            PLAIN,
            ropes=(
                RopeSpec(
                    dim=6,
                    theta=10_000.0,
                    kind="longrope",
                    factor=16.0,
                    original_max_len=512,
                    # sqrt(1 + log(16) / log(512))
                    attention_factor=1.2018504251546631,
                    short_factors=(1.0, 1.0, 1.5),
                    long_factors=(1.0, 2.5, 8.0),
                ),
            )
            * 4,
            windows=(262144,) * 4,
            tied_embeddings=True,
            fused_projections=True,
        ),
    ),
    "GemmaForCausalLM": (GEMMA1, GEMMA_SPEC),
    "Gemma2ForCausalLM": (
        GEMMA2,
        replace(
            GEMMA_SPEC,
            windows=(4096, None, 4096, None),
            attention_scale=1 / 16,
            has_output_norms=True,
            score_cap=50.0,
            logit_cap=30.0,
        ),
    ),
    "Gemma3ForCausalLM": (
        GEMMA3,
        replace(
            GEMMA_SPEC,
            ropes=(NEAR, NEAR, WIDE, NEAR),
            windows=(512, 512, None, 512),
            attention_scale=0.1,
            has_output_norms=True,
            qk_norm="head",
        ),
    ),
    "GraniteForCausalLM": (
        GRANITE,
        replace(
            PLAIN,
            ropes=(RopeSpec(60, 1e7),) * 4,
            attention_scale=1 / 64,
            tied_embeddings=True,
            logit_divisor=8.0,
            embedding_scale=12.0,
            residual_scale=0.22,
        ),
    ),
    "Olmo2ForCausalLM": (OLMO2, OLMO_SPEC),
    "Olmo3ForCausalLM": (
        OLMO3,
        replace(OLMO_SPEC, ropes=(*[RopeSpec(60, 5e5)] * 3, YARN), windows=(*[4096] * 3, None)),
    ),
    "StableLmForCausalLM": (
        STABLELM,
        replace(
            PLAIN,
            norm=NormSpec("layer", 1e-5),
            ropes=(RopeSpec(6, 10_000.0),) * 4,
            qkv_bias=True,
        ),
    ),
}


@pytest.mark.parametrize("architecture", SPECS)
def test_a_config_as_it_is_on_the_hub_is_read_whole(architecture):
    config, expected = SPECS[architecture]
    assert spec_from_config({**SIZES, **config}) == replace(expected, architecture=architecture)


@pytest.mark.parametrize(
    "config",
    [
        transformers.SmolLM3Config(),
        transformers.Phi3Config(),
        transformers.GemmaConfig(),
        transformers.Gemma2Config(),
        transformers.Gemma3TextConfig(),
        transformers.GraniteConfig(),
        transformers.Olmo2Config(),
        transformers.Olmo3Config(),
        transformers.StableLmConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_config_object_of_transformers_5_reads_as_its_json(config):
    assert spec_from_config(config) == spec_from_config(config.to_diff_dict())


REFUSED = [
    (SMOLLM3, {"no_rope_layers": [1, 1, 2, 0]}, "no_rope_layers = [1, 1, 2, 0]"),
    (SMOLLM3, {"layer_types": ["sliding_attention"] * 4}, "4 times one of full_attention"),
    (PHI4_MINI, {"interpolate_factor": 2}, "interpolate_factor = 2 but must have 1"),
    (PHI4_MINI, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    (PHI4_MINI, {"partial_rotary_factor": 0.2}, "short_factor = [1.0, 1.0, 1.5] but must have 6"),
    (
        PHI4_MINI,
        {"partial_rotary_factor": 0.05},
        "rotates 3 of a head's 60 entries but must rotate evenly many",
    ),
    (PHI4_MINI, {"partial_rotary_factor": float("inf")}, "inf but must have a positive number"),
    (PHI4_MINI, {"original_max_position_embeddings": 1}, "= 1 but must have at least 2"),
    (PHI4_MINI, {"rope_theta": 1}, "rope_theta = 1.0 but must have a number above 1"),
    (PHI4_MINI, {"lm_head_bias": True}, "lm_head_bias = True, which is not understood"),
    (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    (GEMMA2, {"head_dim": None}, "no head_dim"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0, which is not"),
    (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "an object of full_attention and"),
    (OLMO3, {"rope_theta": 10000.0}, "rope_theta = 10000.0 but must have 500000"),
    (STABLELM, {"qk_layernorm": "yes"}, "qk_layernorm = 'yes' but must have true or false"),
    (STABLELM, {"head_dim": 30}, "head_dim = 30 but must have hidden_size / num_attention_heads"),
]


@pytest.mark.parametrize(("config", "change", "message"), REFUSED)
def test_what_a_family_does_not_understand_is_refused_by_name(config, change, message):
    with pytest.raises(ConfigError) as error:
        spec_from_config({**SIZES, **config, **change})
    assert message in str(error.value)


def test_longrope_is_long_for_all_positions_of_a_table_that_passes_its_original_context():
    rope = SPECS["Phi3ForCausalLM"][1].ropes[0]
    short, whole = rotary_table(rope, 512), rotary_table(rope, 513)
    # The first pair is stretched by neither, the second by 2.5 in the longer table.
    assert torch.equal(short[:, 0], whole[:512, 0])
    torch.testing.assert_close(short[2, 1], whole[5, 1])
