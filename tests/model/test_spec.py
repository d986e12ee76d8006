import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.errors import ConfigError
from octavo.model.families import spec_from_config
from octavo.model.rope import RopeSpec, inverse_frequencies, rotary_table
from octavo.model.spec import ModelSpec, NormSpec

# As on the hub today, written by transformers 4: rope_theta and rope_scaling stand on their own.
OLD_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
OLD_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_llama_config_of_transformers_4_is_read_whole():
    assert spec_from_config(OLD_LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        norm=NormSpec("rms", 1e-05),
        ropes=(
            RopeSpec(
                dim=64,
                theta=500000.0,
                kind="llama3",
                factor=32.0,
                original_max_len=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        )
        * 16,
        windows=(None,) * 16,
        attention_scale=0.125,
        tied_embeddings=True,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


def test_a_qwen2_config_of_transformers_4_has_qkv_biases_and_no_window():
    spec = spec_from_config(OLD_QWEN2)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, None)
    assert spec.windows == (None,) * 24
    assert spec.ropes == (RopeSpec(dim=64, theta=1000000.0),) * 24
    assert spec.eos_token_ids == (151645,)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.MistralConfig(),
        transformers.Qwen2Config(),
        transformers.Qwen3Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_config_object_of_transformers_5_reads_as_its_json(config):
    spec = spec_from_config(config)
    assert spec == spec_from_config(config.to_diff_dict())
    assert spec.head_dim == 128
    assert set(spec.ropes) == {RopeSpec(dim=128, theta=10000.0)}


def test_old_and_new_place_of_rope_parameters_read_alike():
    old = {k: v for k, v in OLD_LLAMA.items() if not k.startswith("rope_")}
    parameters = {**OLD_LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert spec_from_config({**old, "rope_parameters": parameters}) == (spec_from_config(OLD_LLAMA))


def test_windows_follow_layer_types_and_max_window_layers():
    window = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 3}
    spec = spec_from_config({**OLD_QWEN2, **window, "max_window_layers": 1})
    assert spec.windows == (None, 64, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = spec_from_config({**OLD_QWEN2, **window, "layer_types": kinds})
    assert spec.windows == (64, None, 64)


@pytest.mark.parametrize("value", [-1, 1e308, "x", [1], [{}]], ids=str)
def test_rotations_that_are_no_objects_are_refused(value):
    config = transformers.Gemma3TextConfig().to_dict()
    for kind in ("full_attention", "sliding_attention"):
        parameters = {**config["rope_parameters"], kind: value}
        with pytest.raises(ConfigError, match="must have an object for each kind of layer"):
            spec_from_config({**config, "rope_parameters": parameters})
    phi = transformers.Phi3Config().to_dict()
    with pytest.raises(ConfigError, match=r"rope_type = .* but must have one of default, longrope"):
        spec_from_config({**phi, "rope_parameters": {"rope_type": value}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' but must have one of llama, mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "must have LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": "2048"}, "hidden_size = '2048' but must have a positive integer"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 but must have a positive number"),
        ({"num_key_value_heads": 5}, "a divisor of num_attention_heads (32)"),
        ({"head_dim": None, "hidden_size": 2050}, "a multiple of num_attention_heads (32)"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' but must have true or false"),
        ({"eos_token_id": "end"}, "eos_token_id = 'end' but must have token ids"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"sliding_window": 4096}, "sliding_window = 4096, which is not understood"),
        ({"rope_interleaved": True}, "rope_interleaved = True, which is not understood"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5, which is not understood"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type = 'proportional'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "new": 1}}, "new = 1, which"),
        (
            {"rope_scaling": {"partial_rotary_factor": 0.5}},
            "rotates 32 of a head's 64 entries but must rotate all, and",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ConfigError) as error:
        spec_from_config({**OLD_LLAMA, **change})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "24 times one of full_attention"),
        ({"layer_types": ["sliding_attention"] * 24}, "24 times one of full_attention"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window = None"),
        ({"num_key_value_heads": None}, "no num_key_value_heads"),
    ],
)
def test_contradictory_windows_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        spec_from_config({**OLD_QWEN2, **change})
    assert message in str(error.value)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {**OLD_LLAMA["rope_scaling"], "rope_theta": 500000.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.3},
    "longrope-kept-short": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + index / 50 for index in range(64)],
        "long_factor": [2.0 + index / 3 for index in range(64)],
        "original_max_position_embeddings": 4096,
    },
    "longrope-stretched": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + index / 50 for index in range(64)],
        "long_factor": [2.0 + index / 3 for index in range(64)],
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-with-options": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    },
    "yarn-with-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES)
def test_rotary_table_has_transformers_own_bits(parameters):
    config = transformers.LlamaConfig(
        max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    reference = LlamaRotaryEmbedding(config)
    rope = spec_from_config(config).ropes[0]
    positions = torch.arange(3000)
    cos, sin = reference(torch.empty(0), positions[None])
    half = rope.dim // 2
    assert torch.equal(inverse_frequencies(rope, 3000), reference.inv_freq)
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    assert torch.equal(rotary_table(rope, 3000), expected)
