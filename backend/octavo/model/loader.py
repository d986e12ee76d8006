"""From a model's name to a decoder that is ready to run.

Reads the checkpoint's spec, and each tensor once: converted, fused with its neighbours, packed,
released. Knows nothing of sequences or memory for KV blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.model.decoder import Decoder, DecoderWeights, LayerWeights
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.location import checkpoint_directory
from octavo.model.rope import rotary_table
from octavo.model.spec import ModelSpec, read_token_ids
from octavo_kernels import AttentionBackend, KVCacheShape, make_attention_backend

_IGNORED_TENSORS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the parts around it need to know."""

    spec: ModelSpec
    decoder: Decoder
    attention: AttentionBackend
    """Owner of the KV cache's layout; `attention.shape` sizes its blocks."""
    dtype: torch.dtype
    device: torch.device
    directory: Path
    """The checkpoint; its tokenizer is there too."""
    max_model_len: int
    """Positions the decoder covers, in tokens."""


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the model an engine is configured for; `config.model` may not be `demo`.

    Raises:
        ConfigError: the checkpoint or the device cannot be served; the message says why.
    """
    directory = checkpoint_directory(
        config.model,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    spec = read_spec(directory, trust_remote_code=config.trust_remote_code)
    max_model_len = config.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"option max_model_len is {max_model_len} but the model's context is "
            f"{spec.max_position_embeddings} tokens"
        )
    device = _device(config.device)
    checkpoint = Checkpoint(directory, allow_pickle=config.allow_pickle)
    checkpoint.check(expected_tensors(spec), _ignored_tensors(spec))
    dtype = _dtype(config.dtype, spec, checkpoint)
    reader = _WeightReader(checkpoint, spec, dtype, device, deterministic=config.deterministic)
    weights = reader.read(max_model_len)
    shape = KVCacheShape(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )
    attention = make_attention_backend(shape, device)
    decoder = Decoder(spec, weights, attention)
    return LoadedModel(spec, decoder, attention, dtype, device, directory, max_model_len)


def read_spec(directory: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """Read a checkpoint's spec; generation_config.json, where it names end tokens, is believed.

    Raises:
        ConfigError: a file is missing or damaged, or the model is not supported, or it says that
            code of its own belongs to it and that is not trusted.
    """
    config = read_json(directory / "config.json")
    if config.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            f"{directory / 'config.json'} says that code of its own (auto_map) belongs to the "
            "model; set option trust_remote_code to true if Octavo's own decoder does the same, "
            "which is what computes in any case"
        )
    spec = ModelSpec.from_hf_config(config)
    generation_path = directory / "generation_config.json"
    if not generation_path.exists():
        return spec
    eos_token_ids = read_token_ids(read_json(generation_path).get("eos_token_id"))
    return replace(spec, eos_token_ids=eos_token_ids) if eos_token_ids else spec


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a checkpoint of this spec has."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes


class _WeightReader:
    """Reads a checked checkpoint into decoder weights of one dtype on one device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._deterministic = deterministic
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def read(self, max_len: int) -> DecoderWeights:
        embedding, lm_head = self._vocabulary()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(i) for i in range(self._spec.num_layers)),
            final_norm=self._tensor("model.norm.weight"),
            lm_head=lm_head,
            cos_sin=rotary_table(self._spec.rope, max_len).to(self._device),
        )

    def _vocabulary(self) -> tuple[Embedding, PackedLinear]:
        weight = self._tensor("model.embed_tokens.weight")
        if not self._spec.tied_embeddings:
            return Embedding(weight), self._linear(["lm_head"], has_bias=False)
        lm_head = PackedLinear(weight, deterministic=self._deterministic)
        return Embedding(weight, lm_head), lm_head

    def _layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        norms = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
        q_norm, k_norm = map(self._tensor, norms) if spec.qk_norm else (None, None)
        gate_up = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(qkv, spec.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._linear([f"{prefix}self_attn.o_proj"], spec.o_bias),
            mlp_norm=self._tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(gate_up, spec.mlp_bias, is_gated=True),
            down=self._linear([f"{prefix}mlp.down_proj"], spec.mlp_bias),
        )

    def _linear(self, names: list[str], has_bias: bool, is_gated: bool = False) -> PackedLinear:
        bias = self._tensor(*(f"{name}.bias" for name in names)) if has_bias else None
        parts = [self._checkpoint.tensor(f"{name}.weight") for name in names]
        weight = self._scratch_for(_joined_shape(parts))
        linear = PackedLinear(
            _join(parts, weight), bias, is_gated=is_gated, deterministic=self._deterministic
        )
        if linear.keeps_weight:
            self._scratch = self._scratch.new_empty(0)
        return linear

    def _scratch_for(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory for a weight that is to be packed, the same for one after the other.

        What is allocated for each and freed again would leave holes between the packed ones.
        """
        size = math.prod(shape)
        if len(self._scratch) < size:
            self._scratch = self._scratch.new_empty(size)
        return self._scratch[:size].view(shape)

    def _tensor(self, *names: str) -> torch.Tensor:
        """Return tensors joined along their rows, in memory of their own."""
        parts = [self._checkpoint.tensor(name) for name in names]
        shape = _joined_shape(parts)
        return _join(parts, torch.empty(shape, dtype=self._dtype, device=self._device))


def _joined_shape(parts: list[torch.Tensor]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _join(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write tensors into `out`, joined along their rows, and return it."""
    start = 0
    for part in parts:
        out[start : start + part.shape[0]] = part
        start += part.shape[0]
    return out


def _ignored_tensors(spec: ModelSpec) -> tuple[str, ...]:
    # Some tools store the tied projection a second time.
    return (*_IGNORED_TENSORS, "lm_head.weight") if spec.tied_embeddings else _IGNORED_TENSORS


def _dtype(option: str, spec: ModelSpec, checkpoint: Checkpoint) -> torch.dtype:
    name = spec.dtype if option == "auto" else option
    if name is None:
        return checkpoint.tensor("model.embed_tokens.weight").dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _device(option: str) -> torch.device:
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(option)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"option device is {option!r} but this machine has {count} CUDA devices")
    return device
