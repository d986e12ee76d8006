"""From a model's name to a decoder that is ready to run.

Reads the checkpoint's spec, and has the weights read. Knows nothing of sequences or memory for KV
blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.model.collectives import ALONE, Collectives
from octavo.model.config_bounds import check_bounds
from octavo.model.decoder import Decoder
from octavo.model.devices import rank_devices
from octavo.model.dummy_weights import DummyTensors, warn_of_dummy_weights
from octavo.model.families import read_token_ids, refuse_quantized, spec_from_config
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.joined_experts import checked_tensors
from octavo.model.layers import PackedLinear
from octavo.model.location import configured_checkpoint
from octavo.model.lora_reader import AdapterMemory, list_adapters, read_adapters
from octavo.model.quantization import choose_quantization, weights_text
from octavo.model.shard import WHOLE, ModelPart, Shard
from octavo.model.spec import ModelSpec
from octavo.model.tensor_names import EMBEDDING, LM_HEAD
from octavo.model.text_tensors import TextTensors
from octavo.model.weight_reader import TensorSource, WeightReader
from octavo_kernels import (
    AttentionBackend,
    KVCacheShape,
    make_attention_backend,
)

logger = logging.getLogger(__name__)

#: Of a vocabulary, that are compared at a time.
_PIECE_ROWS = 4096
_IGNORED_TENSORS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's part, ready to run, and what those around it need to know."""

    spec: ModelSpec
    """Of the whole model; that of the part is `decoder.spec`."""
    decoder: Decoder
    attention: AttentionBackend
    """Owner of the KV cache's layout; `attention.shape` sizes the part's blocks."""
    dtype: torch.dtype
    device: torch.device
    directory: Path
    """The checkpoint; its tokenizer is there too."""
    max_model_len: int
    """Positions the decoder covers, in tokens."""
    adapters: AdapterMemory


def load_model(
    config: EngineConfig,
    shard: Shard = WHOLE,
    collectives: Collectives = ALONE,
    device: torch.device | None = None,
) -> LoadedModel:
    """Load the model an engine is configured for; `config.model` may not be `demo`.

    Args:
        config: the options.
        shard: the part to load; no more of the weights is read.
        collectives: of the shard's tensor group.
        device: where to; by default, where the options say that a single rank is.

    Raises:
        ConfigError: the checkpoint or the device cannot be served, or the model cannot be divided
            so; the message says why.
    """
    directory = configured_checkpoint(config)
    spec = read_spec(directory, trust_remote_code=config.trust_remote_code)
    max_model_len = choose_max_model_len(config, spec.max_position_embeddings)
    device = device or rank_devices(config)[0]
    tensors = open_tensors(config, directory, spec, device)
    spec = spec_as_stored(spec, tensors)
    part = ModelPart.of(spec, shard)
    # Before the weights, whose reading takes long: a bad list is soon known.
    listed = list_adapters(config, spec)
    dtype = choose_dtype(config.dtype, spec, tensors)
    stored_as = choose_quantization(config.quantization, dtype, device)
    make_linear = partial(PackedLinear, stored_as=stored_as, deterministic=config.deterministic)
    make_grouped = partial(GroupedLinear, stored_as=stored_as)
    reader = WeightReader(tensors, part, dtype, device, make_linear, make_grouped)
    weights = reader.read(max_model_len)
    log_weights(reader.num_bytes, dtype, config.quantization)
    shape = KVCacheShape(
        num_layers=part.spec.num_layers,
        num_kv_heads=part.spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )
    attention = make_attention_backend(shape, device)
    adapters = read_adapters(config, listed, part, weights.layers, device)
    decoder = Decoder(part.spec, weights, attention, collectives, adapters.low_ranks)
    return LoadedModel(
        *(spec, decoder, attention, dtype, device, directory, max_model_len, adapters)
    )


def read_spec(directory: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """Read a checkpoint's spec; generation_config.json, where it names end tokens, is believed.

    Raises:
        ConfigError: a file is missing or damaged, or the model is not supported, or it says that
            code of its own belongs to it and that is not trusted.
    """
    config = read_model_config(directory, trust_remote_code=trust_remote_code)
    spec = spec_from_config(config)
    return replace(spec, eos_token_ids=end_tokens(directory, list(spec.eos_token_ids)))


def read_model_config(directory: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return a checkpoint's config.json.

    Raises:
        ConfigError: it is missing or damaged, or says what no model has, or its weights are
            quantized, or it says that code of its own belongs to it and that is not trusted.
    """
    config = read_json(directory / "config.json")
    if config.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            f"{directory / 'config.json'} says that code of its own (auto_map) belongs to the "
            "model; set option trust_remote_code to true if you trust it, or if Octavo's own "
            "decoder does the same, which computes where it knows the architecture"
        )
    refuse_quantized(config)
    check_bounds(config)
    return config


def end_tokens(directory: Path, of_config: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: those of generation_config.json, else of the config.

    Raises:
        ConfigError: they are not token ids.
    """
    generation_path = directory / "generation_config.json"
    values = read_json(generation_path) if generation_path.exists() else {}
    return read_token_ids(values.get("eos_token_id")) or read_token_ids(of_config)


def choose_max_model_len(config: EngineConfig, num_positions: int) -> int:
    """Return the longest text in tokens, of a model of so many positions.

    Raises:
        ConfigError: option `max_model_len` is more.
    """
    max_model_len = config.max_model_len or num_positions
    if max_model_len > num_positions:
        raise ConfigError(
            f"option max_model_len is {max_model_len} but the model's context is "
            f"{num_positions} tokens"
        )
    return max_model_len


def open_tensors(
    config: EngineConfig, directory: Path, spec: ModelSpec, device: torch.device
) -> TensorSource:
    """Return where the tensors of a checkpoint are read from; their names and shapes are checked.

    Raises:
        ConfigError: they are not those of the spec, or a file is damaged.
    """
    if config.load_format == "dummy":
        warn_of_dummy_weights(directory)
        return DummyTensors(spec, device)
    checkpoint = Checkpoint(directory, allow_pickle=config.allow_pickle)
    source = TextTensors(checkpoint) if spec.is_text_part else checkpoint
    return checked_tensors(spec, source, _ignored_tensors(spec))


def _ignored_tensors(spec: ModelSpec) -> tuple[str, ...]:
    # Some tools store the tied projection a second time.
    return (*_IGNORED_TENSORS, "lm_head.weight") if spec.tied_embeddings else _IGNORED_TENSORS


def spec_as_stored(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """Return a spec that has no tied embeddings where a projection beside them differs.

    Transformers reads such a checkpoint so, and writes it with a config that says they are tied.

    Raises:
        ConfigError: the projection is of another shape.
    """
    names = (EMBEDDING, f"{LM_HEAD}.weight")
    if not spec.tied_embeddings or names[1] not in tensors:
        return spec
    for start in range(0, spec.vocab_size, _PIECE_ROWS):
        rows = slice(start, min(start + _PIECE_ROWS, spec.vocab_size))
        embedding, head = (tensors.tensor(name, rows) for name in names)
        if head.shape != embedding.shape:
            raise ConfigError(f"tensor {names[1]} has not the shape of {names[0]}")
        if not torch.equal(embedding, head):
            logger.warning("%s is not %s, whatever tie_word_embeddings says: used", *names[::-1])
            return replace(spec, tied_embeddings=False)
    return spec


def choose_dtype(option: str, spec: ModelSpec, tensors: TensorSource) -> torch.dtype:
    """Return the dtype of weights: the option's, else the config's, else that of the tensors."""
    name = spec.dtype if option == "auto" else option
    if name is None:
        return tensors.tensor(EMBEDDING).dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def log_weights(num_bytes: int, dtype: torch.dtype, quantization: str = "none") -> None:
    """Log what the weights of this process take, and what option `quantization` stores them as."""
    name = str(dtype).removeprefix("torch.")
    logger.info("weights: %s bytes, %s", f"{num_bytes:,}", weights_text(name, quantization))
