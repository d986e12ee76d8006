"""A checkpoint of joined experts is read as one of single ones."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError

QWEN3_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 27,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize(
    ("family", "options"), [("mixtral", {"num_local_experts": 5}), ("qwen3_moe", QWEN3_MOE)]
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_joined_experts_give_the_bits_of_single_ones(
    family, options, tp_size, make_checkpoint, load_ranks, make_driver, make_prompt
):
    directory, model = make_checkpoint(family, **options)
    prompt = {"a": make_prompt(20)}
    expected = make_driver(load_ranks(directory, tp_size)).step(prompt, all_rows=True)
    model.save_pretrained(directory, save_original_format=False)
    names = load_file(directory / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    actual = make_driver(load_ranks(directory, tp_size)).step(prompt, all_rows=True)
    assert torch.equal(actual, expected)


def test_joined_experts_of_another_shape_are_refused(make_checkpoint, load):
    directory, model = make_checkpoint("mixtral", num_local_experts=5)
    model.save_pretrained(directory, save_original_format=False)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:4].clone()
    save_file(tensors, path)
    wrong = rf"wrong shape: {name} \[4, 60, 106\] instead of \[5, 60, 106\]"
    with pytest.raises(ConfigError, match=wrong):
        load(directory)
