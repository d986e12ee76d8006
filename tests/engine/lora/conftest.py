"""Three adapters of a tiny model, as PEFT writes them, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "gate_up_proj", "down_proj"]
#: What each adapter's config says, and the dtype of its tensors. Some names are of some models.
CONFIGS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "everywhere": ({"r": 3, "lora_alpha": 6, "target_modules": ATTENTION + MLP}, torch.float32),
    "some": (
        {
            "r": 5,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": ["v_proj", "q_proj", "qkv_proj"],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 9},
        },
        torch.bfloat16,
    ),
    "mlp": ({"r": 1, "lora_alpha": 1, "target_modules": MLP[1:]}, torch.float32),
}


def is_named(module: str, name: str) -> bool:
    return module.endswith(f".{name}")


def scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """Return an adapter's factor, by PEFT's rules."""
    patterns = config.get("alpha_pattern", {}).items()
    alpha = next((each for name, each in patterns if is_named(module, name)), config["lora_alpha"])
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def save_adapter(folder: Path, name: str, linears: dict[str, torch.Size], seed: int) -> None:
    """Write one of `CONFIGS` with random tensors, for linear layers of these shapes."""
    config, dtype = CONFIGS[name]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in linears.items():
        if not any(is_named(module, target) for target in config["target_modules"]):
            continue
        ranks = config.get("rank_pattern", {}).items()
        rank = next((rank for part, rank in ranks if is_named(module, part)), config["r"])
        down = torch.randn(rank, inputs, generator=generator) * 0.3
        up = torch.randn(outputs, rank, generator=generator) * 0.3
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def linears_of(model: Any) -> dict[str, torch.Size]:
    """Return the shapes of a transformers model's linear layers within its layers, by name."""
    return {
        name: module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


@pytest.fixture(scope="session")
def make_adapters(checkpoints, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function: write all adapters for a checkpoint; return the list of them."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(f"adapters-{family}")
        linears = linears_of(AutoModelForCausalLM.from_pretrained(checkpoints[family]))
        for seed, name in enumerate(CONFIGS):
            save_adapter(folder / name, name, linears, seed)
        path = folder / "multi_lora.json"
        path.write_text(json.dumps({name: name for name in CONFIGS}))
        return path

    return make


@pytest.fixture(scope="session")
def adapters(make_adapters) -> Path:
    """The list of three adapters of the tiny llama."""
    return make_adapters("llama")


@pytest.fixture(scope="session")
def merge(checkpoints) -> Callable[[str, Path, str | None], Any]:
    """Return a function: a family's model in float32, an adapter of a list merged into it."""

    def load(family: str, adapters: Path, name: str | None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
        if name is None:
            return model
        from safetensors.torch import load_file

        tensors = load_file(adapters.parent / name / "adapter_model.safetensors")
        for module in linears_of(model):
            down = tensors.get(f"base_model.model.{module}.lora_A.weight")
            up = tensors.get(f"base_model.model.{module}.lora_B.weight")
            if down is not None and up is not None:
                factor = scaling(CONFIGS[name][0], module, len(down))
                weight = model.get_submodule(module).weight.data
                weight += factor * (up.float() @ down.float())
        return model

    return load
