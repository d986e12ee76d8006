"""An adapter of a model that reads images is one of its text, whatever its modules are called."""

import json

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ConfigError
from octavo.model.lora_files import LoraFiles

Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
SHAPES = dict.fromkeys((Q0, Q1), (12, 8))
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}


def tensors(*modules):
    shapes = {"lora_A": (3, 8), "lora_B": (12, 3)}
    return {
        f"base_model.model.{module}.{name}.weight": torch.randn(shape)
        for module in modules
        for name, shape in shapes.items()
    }


def read(directory, weights, **config):
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(weights, directory / "adapter_model.safetensors")
    return LoraFiles(directory, SHAPES, max_rank=8)


@pytest.mark.parametrize("full_names", [True, False])
@pytest.mark.parametrize(
    ("prefix", "tower"),
    [
        ("language_model.model.", "vision_tower.layers.0.self_attn.q_proj"),
        ("model.language_model.", "model.vision_tower.layers.0.self_attn.q_proj"),
    ],
)
def test_modules_of_text_are_changed_and_those_of_images_left_out(
    prefix, tower, full_names, tmp_path, caplog
):
    caplog.set_level("INFO")

    def whole(name):
        return name.replace("model.layers.", f"{prefix}layers.")

    weights = tensors(Q0, Q1)
    stored = {whole(name): tensor for name, tensor in weights.items()} | tensors(tower)
    config = {"target_modules": [whole(Q0), whole(Q1), tower], "alpha_pattern": {whole(Q0): 9}}
    files = read(tmp_path, stored, **(config if full_names else {}))
    assert files.modules == (Q0, Q1)
    for module, factor in ((Q0, 3.0 if full_names else 2.0), (Q1, 2.0)):
        down, up = (weights[f"base_model.model.{module}.lora_{end}.weight"] for end in "AB")
        assert torch.equal(files.pair(module).down, down)
        assert torch.equal(files.pair(module).up, up * factor)
    assert "images are off: 2 tensors of" in caplog.text


def test_a_module_by_two_names_is_refused(tmp_path):
    twice = tensors(Q0, Q0.replace("model.layers", "language_model.model.layers"))
    with pytest.raises(ConfigError, match=rf"has base_model.model.{Q0}.lora_..weight twice"):
        read(tmp_path, twice)
