"""Models for the engine's tests: tiny random checkpoints of each family, and the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.local.demo_model import demo_checkpoint
from octavo.request import Request, TokenOutput
from octavo.sampling_params import SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SHAPE = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny random checkpoints by family, and of the demo model as `demo`."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {"demo": demo_checkpoint()}
    for seed, family in enumerate(FAMILIES):
        torch.manual_seed(seed)
        extra = {"head_dim": 20} if family == "qwen3" else {}
        extra |= {"sliding_window": 40} if family == "mistral" else {}
        config = AutoConfig.for_model(family, **_SHAPE, **extra)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # The default initialisation is so small that every logit is nearly the same.
            if "norm" not in name:
                parameter.data.normal_(std=0.2)
        model.save_pretrained(root / family)
        made[family] = root / family
    return made


class EngineDriver:
    """Runs an engine to the end and checks that nothing leaks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[TokenOutput]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        info = self.engine.info
        resolved = params.resolve(len(prompt), info.max_num_tokens, info.default_max_tokens)
        self.engine.add(Request(name, tuple(prompt), resolved))
        self.outputs[name] = []

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self.outputs[output.request_id].append(output)
        self.engine.check_integrity()

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.step()
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks

    def tokens(self, name: str) -> list[int]:
        return [i for output in self.outputs[name] for i in output.token_ids]

    def trace(self, name: str) -> list[tuple[int, float]]:
        """Return (token id, log-probability) of each output token, to compare to the bit."""
        return [
            pair
            for output in self.outputs[name]
            for pair in zip(output.token_ids, output.logprobs, strict=True)
        ]


@pytest.fixture
def make_driver(checkpoints: dict[str, Path]):
    """Make a driver over an engine of the named checkpoint, with options."""

    def make(name: str, **options: Any) -> EngineDriver:
        values = {"num_kv_blocks": 512, "cpu_threads": 2, **options}
        config = EngineConfig.from_mapping({"model": str(checkpoints[name]), **values})
        return EngineDriver(Engine.load(config))

    return make


@pytest.fixture(scope="session")
def make_prompts():
    """Make seeded prompts of the given lengths."""

    def make(lengths: list[int], vocab_size: int = 331) -> list[list[int]]:
        generator = torch.Generator().manual_seed(len(lengths))
        return [
            torch.randint(8, vocab_size, (length,), generator=generator).tolist()
            for length in lengths
        ]

    return make
