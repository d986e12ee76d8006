"""What a model of paged KV needs of its devices: bytes of weights, and the shape of blocks.

Knows nothing of how much memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.loader import (
    choose_dtype,
    choose_max_model_len,
    open_tensors,
    read_spec,
    spec_as_stored,
)
from octavo.model.shard import ModelPart, Shard
from octavo.model.spec import ModelSpec
from octavo.model.tiers import Tier
from octavo.model.weight_sizes import part_bytes
from octavo.model_check.glimpse import Glimpse
from octavo_kernels import KVCacheShape


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model needs on its devices."""

    architecture: str
    dtype: torch.dtype
    max_model_len: int
    weight_bytes: tuple[int, ...]
    """Of each rank."""
    shapes: tuple[KVCacheShape, ...]
    """Of each rank's blocks."""
    windows: tuple[int | None, ...]
    spec: ModelSpec | None = None
    """Of a native model."""


def native_needs(config: EngineConfig, seen: Glimpse) -> Needs:
    """Return what the native decoder of a model needs.

    Raises:
        ConfigError: its tensors are not those of its config, or it cannot be divided so.
    """
    spec, dtype = _spec_and_dtype(config, seen)
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
    shards = [Shard.of(rank, *sizes) for rank in range(config.num_ranks)]
    parts = [ModelPart.of(spec, shard) for shard in shards]
    of_8_bits = config.quantization != "none"
    return Needs(
        architecture=spec.architecture,
        dtype=dtype,
        max_model_len=choose_max_model_len(config, spec.max_position_embeddings),
        weight_bytes=tuple(part_bytes(part, dtype, of_8_bits=of_8_bits) for part in parts),
        shapes=tuple(
            _shape(config, part.spec.num_layers, part.spec.num_kv_heads, spec.head_dim, dtype)
            for part in parts
        ),
        windows=spec.windows,
        spec=spec,
    )


def _spec_and_dtype(config: EngineConfig, seen: Glimpse) -> tuple[ModelSpec, torch.dtype]:
    """Return those of a model; tensors that are there are checked too."""
    spec = read_spec(seen.directory, trust_remote_code=config.trust_remote_code)
    if seen.has_weights:
        tensors = open_tensors(config, seen.directory, spec, torch.device("cpu"))
        spec = spec_as_stored(spec, tensors)
        return spec, choose_dtype(config.dtype, spec, tensors)
    name = spec.dtype if config.dtype == "auto" else config.dtype
    if name is None:
        raise unnamed_dtype(config)
    return spec, getattr(torch, name)


def traced_needs(config: EngineConfig, seen: Glimpse, tier: Tier) -> Needs:
    """Return what a model of transformers over paged KV needs.

    Raises:
        ConfigError: its files are damaged.
    """
    # Imported late: a native decoder needs none of it.
    from octavo.model.packed_modules import weight_bytes
    from octavo.model.pretrained import make_without_weights
    from octavo.model.transformers_loader import choose_dtype as choose_traced_dtype

    traced = tier.traced
    assert traced is not None, "only a traced model comes here"
    known = config
    if not seen.has_weights:
        named = traced.config.get_text_config().dtype or traced.config.dtype
        if config.dtype == "auto" and named is None and config.load_format != "dummy":
            raise unnamed_dtype(config)
        known = replace(config, load_format="dummy")
    dtype = choose_traced_dtype(known, seen.directory, traced)
    model = make_without_weights(config, seen.directory, dtype).module
    shape = (len(traced.windows), traced.num_kv_heads, traced.head_dim, dtype)
    return Needs(
        architecture=traced.architecture,
        dtype=dtype,
        max_model_len=choose_max_model_len(config, traced.max_position_embeddings),
        weight_bytes=(weight_bytes(model, of_8_bits=config.quantization != "none"),),
        shapes=(_shape(config, *shape),),
        windows=traced.windows,
    )


def _shape(
    config: EngineConfig, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVCacheShape:
    return KVCacheShape(num_layers, num_kv_heads, head_dim, config.block_size, dtype)


def unnamed_dtype(config: EngineConfig) -> ConfigError:
    """Return the error of a model whose dtype only its weights say."""
    return ConfigError(
        f"{config.model} names no dtype in its config, and its weights are not here to tell; name "
        "one with option dtype"
    )
