"""Weights of 8 bits as GPUs have them, computed by plain torch: the layers are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError
from octavo.model import grouped_linear, layers, loader, quantization
from octavo.model.quantization import QUANTIZED, choose_quantization
from octavo_kernels import quantize_weight

CUDA = torch.device("cuda:1")
MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
    "experts": ("mixtral", {"num_local_experts": 3, "num_hidden_layers": 2}),
}
#: Tensors that no linear layer multiplies by, or that are not quantised.
KEPT = ("embed_tokens.weight", "gate.weight")


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """Take the path of a GPU, with weights of 8 bits and without."""
    monkeypatch.setattr(layers, "pack_weight", lambda weight, bias, **options: None)
    monkeypatch.setattr(layers, "_pack", lambda weight: None)
    monkeypatch.setattr(grouped_linear, "make_packed_groups", lambda *arguments, **options: None)
    monkeypatch.setattr(loader, "choose_quantization", lambda name, *rest: QUANTIZED.get(name))


@pytest.fixture(params=QUANTIZED)
def quantization_name(request) -> str:
    return request.param


@pytest.fixture
def rewrite(tmp_path: Path):
    """Return a function: copy a checkpoint, with each weight of a linear layer changed."""

    def make(directory: Path, change) -> Path:
        copy = tmp_path / "rewritten"
        shutil.copytree(directory, copy)
        path = copy / "model.safetensors"
        tensors = load_file(path)
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        changed = {
            name: tensor if tensor.dim() != 2 or name.endswith(KEPT) else change(tensor)
            for name, tensor in tensors.items()
        }
        save_file(changed, path, {"format": "pt"})
        return copy

    return make


def dequantized(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    elements, scales = quantize_weight(weight, kind)
    return elements.float() * scales[:, None]


def with_scales_of_two(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return a weight near to this one that quantising leaves as it is."""
    elements, scales = quantize_weight(weight, kind)
    return elements.float() * 2 ** scales.log2().round()[:, None]


def answers_of(model, make_driver, make_prompt):
    prompts = {"a": make_prompt(20), "b": make_prompt(7)}
    return make_driver(model).generate(prompts, num_tokens=6, chunk=16)


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_the_model_of_the_dequantised_weights(
    name, quantization_name, as_on_a_gpu, make_checkpoint, rewrite, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint(MODELS[name][0], **MODELS[name][1])
    other = rewrite(directory, lambda weight: dequantized(weight, QUANTIZED[quantization_name]))
    quantized = load(directory, "float32", quantization=quantization_name)
    tokens, logits = answers_of(quantized, make_driver, make_prompt)
    expected, expected_logits = answers_of(load(other, "float32"), make_driver, make_prompt)
    assert tokens == expected
    for key, rows in logits.items():
        # Each weight was rounded once more, to float32.
        torch.testing.assert_close(rows, expected_logits[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_weights_that_8_bits_hold_give_the_bits_of_the_plain_model(
    name, quantization_name, as_on_a_gpu, make_checkpoint, rewrite, load, make_driver, make_prompt
):
    kind = QUANTIZED[quantization_name]
    directory, _ = make_checkpoint(MODELS[name][0], **MODELS[name][1])
    exact = rewrite(directory, lambda weight: with_scales_of_two(weight, kind))
    quantized = load(exact, "float32", quantization=quantization_name)
    tokens, logits = answers_of(quantized, make_driver, make_prompt)
    expected, expected_logits = answers_of(load(exact, "float32"), make_driver, make_prompt)
    assert tokens == expected
    for key, rows in logits.items():
        assert torch.equal(rows, expected_logits[key])


def test_each_linear_layer_keeps_an_8_bit_weight_and_scales_and_nothing_else(
    quantization_name, as_on_a_gpu, make_checkpoint, load
):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=True)
    weights = load(directory, "bfloat16", quantization=quantization_name).decoder.weights
    linears = [weights.lm_head]
    for layer in weights.layers:
        linears += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
    for linear in linears:
        elements, scales = linear._quantized
        assert elements.dtype == QUANTIZED[quantization_name]
        assert elements.nbytes + scales.nbytes == linear.num_bytes
        assert elements.nbytes == linear.in_features * linear.out_features
        assert not linear.keeps_weight
    assert weights.embedding(torch.arange(9)).dtype == torch.bfloat16


def test_on_a_cpu_fp8_is_refused_with_what_is_allowed(make_checkpoint, load, monkeypatch):
    monkeypatch.setattr(quantization, "packs_weights", lambda dtype, device: True)
    directory, _ = make_checkpoint("llama")
    with pytest.raises(
        ConfigError,
        match=r"^option quantization is 'fp8', which takes a GPU of compute capability 8\.9 or "
        "later, or AMD's gfx942, and the device is cpu; it must be 'none' or 'int8'$",
    ):
        load(directory, quantization="fp8")


@pytest.mark.parametrize(
    ("served", "option", "message"),
    [
        (
            ("int8",),
            "fp8",
            r"takes a GPU of compute capability 8\.9 or later, or AMD's gfx942, and cuda:1 is not "
            "one; it must be 'none' or 'int8'",
        ),
        (
            (),
            "int8",
            "takes kernels in the Triton language, and none serve on cuda:1 here; it must be "
            "'none'",
        ),
    ],
)
def test_on_a_gpu_what_its_kernels_do_not_take_is_refused(served, option, message, monkeypatch):
    types = tuple(QUANTIZED[name] for name in served)
    monkeypatch.setattr(quantization, "quantized_types", lambda device: types)
    with pytest.raises(ConfigError, match=f"^option quantization is '{option}', which {message}$"):
        choose_quantization(option, torch.bfloat16, CUDA)


@pytest.mark.parametrize("option", ["none", *QUANTIZED])
def test_on_a_gpu_with_kernels_for_both_each_is_served(option, monkeypatch):
    monkeypatch.setattr(quantization, "quantized_types", lambda device: tuple(QUANTIZED.values()))
    assert choose_quantization(option, torch.bfloat16, CUDA) == QUANTIZED.get(option)
