"""Random models of the Llama family: as checkpoints that transformers reads, or on a device alone.

Knows how a model's parts are put together, and nothing of how they are run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelLoader
from octavo.model.decoder import Decoder, DecoderWeights, LayerWeights
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.loader import LoadedModel
from octavo.model.rope import rotary_table
from octavo.model.spec import ModelSpec
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
        spec = ModelSpec.from_hf_config(size.config())
        max_len = config.max_model_len or spec.max_position_embeddings
        shape = KVCacheShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, dtype
        )
        attention = make_attention_backend(shape, device)
        weights = _weights(spec, max_len, _Drawer(dtype, device, _std(size), config.deterministic))
        decoder = Decoder(spec, weights, attention)
        return LoadedModel(spec, decoder, attention, dtype, device, Path("random"), max_len)

    return load


def _std(size: ModelSize) -> float:
    """Return the deviation by which products keep the size of what they are given."""
    return 1.0 / math.sqrt(size.hidden_size)


@dataclass(frozen=True, slots=True)
class _Drawer:
    """Draws weights on a device."""

    dtype: torch.dtype
    device: torch.device
    std: float
    deterministic: bool

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=self.std)

    def norm(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def linear(
        self, out_features: int, in_features: int, *, is_gated: bool = False
    ) -> PackedLinear:
        weight = self.tensor(out_features, in_features)
        return PackedLinear(weight, is_gated=is_gated, deterministic=self.deterministic)


def _weights(spec: ModelSpec, max_len: int, draw: _Drawer) -> DecoderWeights:
    hidden = spec.hidden_size
    return DecoderWeights(
        embedding=Embedding(draw.tensor(spec.vocab_size, hidden)),
        layers=tuple(_layer(spec, draw) for _ in range(spec.num_layers)),
        final_norm=draw.norm(hidden),
        lm_head=draw.linear(spec.vocab_size, hidden),
        cos_sin=rotary_table(spec.rope, max_len).to(draw.device),
    )


def _layer(spec: ModelSpec, draw: _Drawer) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return LayerWeights(
        input_norm=draw.norm(hidden),
        qkv=draw.linear(q_size + 2 * kv_size, hidden),
        q_norm=None,
        k_norm=None,
        o=draw.linear(hidden, q_size),
        mlp_norm=draw.norm(hidden),
        gate_up=draw.linear(2 * inner, hidden, is_gated=True),
        down=draw.linear(hidden, inner),
    )


def weight_bytes(size: ModelSize, itemsize: int) -> int:
    """Return the bytes of weights that a step reads: all but the embedding table's unread rows."""
    head_dim = size.hidden_size // size.num_attention_heads
    qkv = (size.num_attention_heads + 2 * size.num_key_value_heads) * head_dim
    layer = size.hidden_size * (qkv + size.hidden_size + 3 * size.intermediate_size)
    return itemsize * (size.num_hidden_layers * layer + size.vocab_size * size.hidden_size)
