"""Which way a checkpoint is served in, and what is said where none will do."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoConfig

from octavo.config import EngineConfig
from octavo.engine_choice import load_chosen
from octavo.errors import ConfigError, NotPaged
from octavo.model.tiers import choose_tier, load_served_model
from octavo.model_check.check import check_model

SMALL = {"vocab_size": 97, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture
def choose(tmp_path):
    """Write the config of a small model of a type; return the tier it gets with options."""

    def choose_for(model_type: str, fields: dict | None = None, **options):
        config = AutoConfig.for_model(model_type, **(SMALL if fields is None else fields))
        values = {**config.to_dict(), "architectures": options.pop("architectures", None)}
        (tmp_path / "config.json").write_text(json.dumps(values | options.pop("more", {})))
        return choose_tier(tmp_path, EngineConfig(str(tmp_path), **options))

    return choose_for


def refusal(choose, *arguments, **options) -> str:
    with pytest.raises(ConfigError) as error:
        choose(*arguments, **options)
    return str(error.value)


def test_a_known_family_is_native_and_may_be_forced_through_transformers(choose):
    assert choose("llama").name == "native"
    assert choose("llama", model_impl="native").name == "native"
    forced = choose("llama", model_impl="transformers")
    assert forced.name == "transformers"
    assert forced.reason == "option model_impl is 'transformers'"
    assert forced.traced.architecture == "LlamaForCausalLM"


def test_another_model_goes_through_transformers_and_cannot_be_forced_to_be_native(choose):
    tier = choose("gpt_neox")
    assert tier.name == "transformers"
    assert tier.reason == "'gpt_neox' is of no native family"
    assert tier.traced.windows == (None, None)
    assert (tier.traced.num_kv_heads, tier.traced.head_dim) == (4, 6)
    message = refusal(choose, "gpt_neox", model_impl="native")
    assert message.startswith(
        "option model_impl is 'native', which does not serve this model: the model config has "
        "model_type = 'gpt_neox' but must have one of llama, "
    )
    assert message.endswith("; 'auto' serves other models too")


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("bloom", None, "BloomForCausalLM does not run without weights and masks"),
        ("falcon", {**SMALL, "alibi": False}, "falcon has attention of its own, with no interface"),
        (
            "mamba",
            {**SMALL, "num_heads": 4},
            "2 layers, none of which calls the attention interface: ",
        ),
        ("recurrent_gemma", {**SMALL, "num_hidden_layers": 3}, "is called by layers [2]"),
        ("diffllama", None, "is called by layers [0, 0, 1, 1]: something else mixes tokens"),
        ("bert", None, "its mask is neither causal nor a sliding window"),
        ("t5", {"vocab_size": 97}, "it has an encoder beside its decoder"),
        ("deepseek_v3", None, "keys and values of uneven sizes"),
    ],
)
def test_what_cannot_be_paged_is_known_before_weights_are_read(choose, model_type, fields, why):
    tier = choose(model_type, fields)
    assert tier.name == "static"
    assert why in tier.reason
    message = refusal(choose, model_type, fields, model_impl="transformers")
    assert message.startswith("option model_impl is 'transformers' but ")
    assert why in message


def test_a_rotation_that_depends_on_the_longest_sequence_is_not_paged(choose):
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    rope |= {"original_max_position_embeddings": 64}
    tier = choose("helium", {**SMALL, "head_dim": 6, "rope_parameters": rope})
    assert tier.name == "static"
    assert "rope_type is longrope, with which the longest sequence of a step" in tier.reason


def test_a_config_that_names_another_head_is_not_taken_for_a_causal_model(choose):
    tier = choose("gpt_neox", architectures=["GPTNeoXForSequenceClassification"])
    assert "its architecture is GPTNeoXForSequenceClassification" in tier.reason


def test_several_ranks_take_the_native_decoder(choose):
    assert choose("llama", tensor_parallel_size=2).name == "native"
    message = refusal(choose, "gpt_neox", tensor_parallel_size=2)
    assert message.startswith(
        "2 ranks take the native decoder, which does not serve this model: the model config has "
    )
    assert message.endswith("; serve it on one")


def test_adapters_take_the_native_decoder(choose):
    assert choose("llama", enable_lora=True).name == "native"
    message = refusal(choose, "gpt_neox", enable_lora=True)
    assert message.startswith(
        "option enable_lora takes the native decoder, which does not serve this model: the model "
    )
    assert message.endswith("; serve it without")
    assert refusal(choose, "llama", enable_lora=True, model_impl="transformers") == (
        "option enable_lora takes the native decoder, but option model_impl is 'transformers'; "
        "serve it without"
    )


@pytest.mark.parametrize("model_impl", ["auto", "native", "transformers"])
def test_what_no_way_can_read_is_refused_by_all(choose, model_impl):
    quantized = {"quantization_config": {"quant_method": "awq"}}
    message = refusal(choose, "gpt_neox", more=quantized, model_impl=model_impl)
    assert message.startswith("the checkpoint is quantized ('awq' in quantization_config)")
    code = {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    message = refusal(choose, "gpt_neox", more=code, model_impl=model_impl)
    assert "set option trust_remote_code to true" in message


NO_TEXT = (
    r"transformers makes no causal model of it \(ValueError: Unrecognized configuration class .*; "
    "transformers cannot {} .*: ValueError: Unrecognized configuration class "
)


@pytest.mark.parametrize(("serve", "verb"), [(load_chosen, "load"), (check_model, "make")])
def test_what_no_way_serves_is_told_why_in_each_and_native_first(choose, tmp_path, serve, verb):
    fields = {"text_config": {"model_type": "ministral3", "intermediate_size": 40, **SMALL}}
    tier = choose("mistral3", fields, load_format="dummy")
    assert tier.name == "static"
    with pytest.raises(ConfigError) as error:
        serve(EngineConfig(str(tmp_path), device="cpu", load_format="dummy"))
    native = f"{tmp_path} is served in no way: the native decoder refuses it: text_config of "
    assert str(error.value).startswith(native)
    assert "model_type = 'ministral3' but " in str(error.value)
    assert re.search(NO_TEXT.format(verb), str(error.value)), error.value
    with pytest.raises(ConfigError, match=rf"^transformers cannot {verb} "):
        serve(EngineConfig(str(tmp_path), device="cpu", load_format="dummy", model_impl="static"))


def test_a_model_type_that_nobody_knows_is_told_so_natively_too(choose, tmp_path):
    message = refusal(choose, "llama", more={"model_type": "novel"})
    assert message.startswith(f"{tmp_path} is served in no way: 'novel' is of no native family; ")
    assert "; transformers cannot read " in message


def test_a_model_that_cannot_be_paged_is_told_so_when_it_is_loaded(choose, tmp_path):
    choose("bert")
    with pytest.raises(NotPaged) as error:
        load_served_model(EngineConfig(str(tmp_path)))
    assert str(error.value).startswith(f"{tmp_path} cannot be served over paged KV: ")
