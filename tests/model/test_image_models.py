"""Of checkpoints that read images too the text is served: what of them is read, and what is not."""

from dataclasses import replace

import pytest
import torch
import transformers
from benchmarks.tiny_image_models import IMAGES, save_image_model
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model import image_models
from octavo.model.families import spec_from_config
from octavo.model.loader import load_model
from octavo.model.rope import RopeSpec
from octavo.model_check.check import check_model

GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "transformers_version": "4.57.1",
    "vision_config": {"head_dim": 64, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "some/model",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {"model_type": "clip_vision_model"},
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}


@pytest.fixture(scope="module", params=IMAGES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / request.param
    save_image_model(request.param, folder)
    return folder


@pytest.fixture
def rewritten(checkpoint, tmp_path):
    """Return a function: write the checkpoint with other tensors, return its folder."""

    def rewrite(edit):
        (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
        tensors = edit(load_file(checkpoint / "model.safetensors"))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return rewrite


def newer_name(name):
    """Return what transformers calls a tensor in memory."""
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.")


def read(folder):
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))


def test_gemma3_says_only_what_differs_from_what_is_taken_for_granted():
    spec = spec_from_config(GEMMA3_4B)
    assert spec.architecture == "Gemma3ForConditionalGeneration"
    assert spec.is_text_part
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (262208, 2560, 34)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.max_position_embeddings, spec.norm.eps) == (131072, 1e-6)
    assert spec.ropes[4:6] == (RopeSpec(256, 10_000.0), RopeSpec(256, 1e6, "linear", factor=8.0))
    assert spec.windows == ((*[1024] * 5, None) * 6)[:34]
    assert (spec.dtype, spec.eos_token_ids, spec.tied_embeddings) == ("bfloat16", (1, 106), True)
    # The same as that of the text model that it is read as.
    text = {**transformers.Gemma3Config(**GEMMA3_4B).text_config.to_dict(), "dtype": "bfloat16"}
    alone = spec_from_config({**text, "eos_token_id": [1, 106]})
    assert replace(alone, architecture=spec.architecture, is_text_part=True) == spec


def test_mistral_small_says_all_of_its_text():
    spec = spec_from_config(MISTRAL_SMALL)
    assert (spec.vocab_size, spec.hidden_size, spec.head_dim) == (131072, 5120, 128)
    assert spec.ropes == (RopeSpec(128, 1e9),) * 40
    assert (spec.windows[0], spec.tied_embeddings, spec.dtype) == (None, False, "bfloat16")


def test_llava_is_read_as_its_text_model():
    spec = spec_from_config(LLAVA)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (32064, 4096, 11008)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 32, 128)
    assert (spec.tied_embeddings, spec.dtype) == (False, "float16")


@pytest.mark.parametrize("model_type", image_models._DEFAULTS)
def test_what_is_taken_for_granted_is_what_transformers_takes(model_type):
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    defaults = image_models._DEFAULTS[model_type]
    assert {name: config[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            LLAVA,
            {"text_config": {"model_type": "qwen2"}},
            "'qwen2' but must have one of llama, mis",
        ),
        (LLAVA, {"text_config": [1]}, "text_config = [1] but must have an object"),
        (LLAVA, {"architectures": ["Other"]}, "must have LlavaForConditionalGeneration"),
        (LLAVA, {"use_more": 3}, "use_more = 3, which is not understood"),
        (
            GEMMA3_4B,
            {"text_config": {"use_bidirectional_attention": True}},
            "use_bidirectional_attention = True, which is not understood",
        ),
        (
            GEMMA3_4B,
            {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
            "is quantized ('gptq' in quantization_config)",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, change, message):
    with pytest.raises(ConfigError) as error:
        spec_from_config({**config, **change})
    assert message in str(error.value)


def test_tensors_of_images_are_counted_and_left_out(checkpoint, caplog):
    caplog.set_level("INFO")
    tensors = load_file(checkpoint / "model.safetensors")
    left_out = [t for name, t in tensors.items() if not name.startswith("language_model.")]
    assert len(left_out) > 10
    read(checkpoint)
    num_bytes = sum(tensor.nbytes for tensor in left_out)
    assert (
        f"images are off: {len(left_out)} tensors of vision_tower and multi_modal_projector, "
        f"{num_bytes:,} bytes, are not read" in caplog.text
    )


def test_names_as_they_were_and_as_they_are_hold_the_same_model(
    checkpoint, rewritten, make_driver, make_prompt
):
    prompt = {"a": make_prompt(30)}
    newer = rewritten(lambda tensors: {newer_name(name): t for name, t in tensors.items()})
    older = make_driver(read(checkpoint)).step(prompt)
    assert torch.equal(make_driver(read(newer)).step(prompt), older)


def test_every_other_tensor_is_accounted_for_by_the_name_that_it_has(rewritten):
    def spoil(tensors):
        del tensors["language_model.model.norm.weight"]
        return {**tensors, "audio_tower.weight": torch.ones(3)}

    with pytest.raises(ConfigError) as error:
        read(rewritten(spoil))
    assert "missing: language_model.model.norm.weight" in str(error.value)
    assert "unexpected: audio_tower.weight" in str(error.value)


def images_off(folder, **options):
    report = check_model(EngineConfig(model=str(folder), device="cpu", **options))
    return report.tier, [each.reason for each in report.off if each.feature == "images"]


def test_a_check_says_that_images_are_off(checkpoint):
    reason = "text alone is served; what reads images is left out"
    assert images_off(checkpoint) == ("native", [reason])


@pytest.mark.parametrize("tier", ["transformers", "static"])
def test_a_check_says_so_where_transformers_own_code_runs(tier, tmp_path):
    save_image_model("gemma3", tmp_path)
    assert images_off(tmp_path, model_impl=tier) == (tier, ["text alone is served"])
