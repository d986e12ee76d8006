"""Random models of the Llama family: as checkpoints that transformers reads, or on a device alone.

Knows how a model's parts are put together, and nothing of how they are run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelLoader
from octavo.model.decoder import Decoder
from octavo.model.dummy_weights import DummyTensors
from octavo.model.families import spec_from_config
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo.model.loader import LoadedModel
from octavo.model.lora_reader import AdapterMemory
from octavo.model.shard import WHOLE, ModelPart
from octavo.model.weight_reader import WeightReader
from octavo_kernels import KVCacheShape, make_attention_backend


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of one shape."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int

    def config(self) -> dict[str, Any]:
        """Return the model's config.json; its vocabulary projection is not the embedding table.

        Random weights that are tied so would repeat the last token.
        """
        sizes = {name: getattr(self, name) for name in self.__slots__}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **sizes,
        }


TINY = ModelSize(64, 160, 2, 4, 2, 331, 512)
SMALL = ModelSize(1024, 2816, 4, 16, 4, 32_000, 4096)
LLAMA_1B = ModelSize(2048, 8192, 16, 32, 8, 128_256, 8192)
LLAMA_8B = ModelSize(4096, 14_336, 32, 32, 8, 128_256, 32_768)


def save_checkpoint(size: ModelSize, directory: Path, device: torch.device) -> None:
    """Write a random bfloat16 checkpoint, made on `device`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    # By its fields: an older config.json says the rotary base in another way than the class.
    config = LlamaConfig(**{k: v for k, v in size.config().items() if k != "architectures"})
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=_std(size))
    model.save_pretrained(directory)


def random_model(size: ModelSize, dtype: torch.dtype, device: torch.device) -> ModelLoader:
    """Return what makes a random model on the device whenever a runner asks for one."""

    def load(config: EngineConfig) -> LoadedModel:
        spec = spec_from_config(size.config())
        max_len = config.max_model_len or spec.max_position_embeddings
        shape = KVCacheShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, dtype
        )
        attention = make_attention_backend(shape, device)
        make_linear = partial(PackedLinear, deterministic=config.deterministic)
        tensors = DummyTensors(spec, device)
        part = ModelPart.of(spec, WHOLE)
        reader = WeightReader(tensors, part, dtype, device, make_linear, GroupedLinear)
        weights = reader.read(max_len)
        decoder = Decoder(spec, weights, attention)
        made = (spec, decoder, attention, dtype, device)
        return LoadedModel(*made, Path("random"), max_len, AdapterMemory())

    return load


def _std(size: ModelSize) -> float:
    """Return the deviation by which products keep the size of what they are given."""
    return 1.0 / math.sqrt(size.hidden_size)


def weight_bytes(size: ModelSize, itemsize: int) -> int:
    """Return the bytes of weights that a step reads: all but the embedding table's unread rows."""
    head_dim = size.hidden_size // size.num_attention_heads
    qkv = (size.num_attention_heads + 2 * size.num_key_value_heads) * head_dim
    layer = size.hidden_size * (qkv + size.hidden_size + 3 * size.intermediate_size)
    return itemsize * (size.num_hidden_layers * layer + size.vocab_size * size.hidden_size)
