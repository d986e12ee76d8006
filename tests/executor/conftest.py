"""Tiny models to run, and makers of steps that name their blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.cache.block_copies import BlockCopies
from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelRunner
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny random checkpoints: every layer of `mistral` sees 20 tokens."""
    made = {}
    for family, extra in {"llama": {}, "mistral": {"sliding_window": 20}}.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(
            family,
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=7,
            **extra,
        )
        made[family] = tmp_path_factory.mktemp(family)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(std=0.2)
        model.save_pretrained(made[family])
    return made


@pytest.fixture(scope="session")
def make_runner(checkpoints) -> Callable[..., ModelRunner]:
    """Load a tiny model with 8 blocks of 8 tokens, and as many on the host."""

    def make(family: str = "llama", make_transfers: Any = None, **options: Any) -> ModelRunner:
        values = {"block_size": 8, "num_kv_blocks": 8, "swap_space_bytes": 8 * BYTES_PER_BLOCK}
        values |= {"max_num_seqs": 4, "cpu_threads": 1, **options}
        config = EngineConfig(str(checkpoints[family]), **values)
        return ModelRunner(config, make_transfers) if make_transfers else ModelRunner(config)

    return make


#: 2 layers, keys and values, 2 heads of 8 floats, 8 tokens.
BYTES_PER_BLOCK = 2 * 2 * 2 * 8 * 4 * 8


@pytest.fixture(scope="session")
def bytes_per_block() -> int:
    return BYTES_PER_BLOCK


@pytest.fixture(scope="session")
def make_step() -> Callable[..., SchedulerOutput]:
    """Make a step in which these sequences compute all they know and draw."""

    def make(*sequences: Sequence, **copies: Any) -> SchedulerOutput:
        shares = [ScheduledSequence(s, s.num_uncomputed_tokens, (s,)) for s in sequences]
        return SchedulerOutput(tuple(shares), copies=BlockCopies(**copies))

    return make
