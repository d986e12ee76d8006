"""Loads a checkpoint as a model of transformers that runs over paged KV.

Transformers reads the tensors, for it knows what every architecture's were called over the years.
Knows nothing of any architecture.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotPaged, first_line
from octavo.model.checkpoint import Checkpoint
from octavo.model.devices import rank_devices
from octavo.model.layers import PackedLinear
from octavo.model.loader import (
    choose_max_model_len,
    end_tokens,
    log_weights,
)
from octavo.model.lora_reader import AdapterMemory
from octavo.model.packed_modules import PackedModule, leave_files, pack_modules, weight_bytes
from octavo.model.paged_check import TOLERANCES, PagedCheck
from octavo.model.pretrained_weights import load_weights
from octavo.model.quantization import choose_quantization
from octavo.model.row_independence import make_rows_independent
from octavo.model.transformers_model import TransformersInfo, TransformersModel
from octavo.model.transformers_trace import TracedModel
from octavo_kernels import AttentionBackend, KVCacheShape, make_attention_backend

logger = logging.getLogger(__name__)

#: What 8-bit weights may add to the difference that a dtype makes.
_TOLERANCE_OF_8_BITS = 0.3


@dataclass(frozen=True, slots=True)
class LoadedTransformersModel:
    """A model of transformers, ready to run; see `ServedModel`."""

    spec: TransformersInfo
    decoder: TransformersModel
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    directory: Path
    max_model_len: int
    adapters: AdapterMemory
    """None: they take the native decoder."""


def load_transformers_model(
    config: EngineConfig, directory: Path, traced: TracedModel
) -> LoadedTransformersModel:
    """Load a checkpoint whose model was traced, and compare it with transformers' own attention.

    Raises:
        NotPaged: it does not compute the same over paged KV.
        ConfigError: the checkpoint or the device cannot be served.
    """
    max_model_len = choose_max_model_len(config, traced.max_position_embeddings)
    (device,) = rank_devices(config)
    dtype = choose_dtype(config, directory, traced)
    stored_as = choose_quantization(config.quantization, dtype, device)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = load_weights(AutoModelForCausalLM, directory, traced.config, config, dtype=dtype, **how)
    model = model.eval().to(device)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    num_bytes = weight_bytes(model, of_8_bits=stored_as is not None)
    log_weights(num_bytes, dtype, config.quantization)
    check = PagedCheck(model, vocab_size, max_model_len, device)
    make_linear = partial(PackedLinear, stored_as=stored_as, deterministic=config.deterministic)
    pack_modules(model, make_linear)
    leave_files(model)
    make_rows_independent(model, _not_packed(model, traced.row_dependent))
    shape = KVCacheShape(
        *(len(traced.windows), traced.num_kv_heads, traced.head_dim, config.block_size, dtype)
    )
    attention = make_attention_backend(shape, device)
    eos_token_ids = end_tokens(directory, traced.config.get_text_config().eos_token_id)
    spec = TransformersInfo(traced.architecture, vocab_size, eos_token_ids, traced.windows)
    decoder = TransformersModel(model, traced.layers, spec, attention)
    _compare(check, decoder, TOLERANCES[dtype] + _TOLERANCE_OF_8_BITS * (stored_as is not None))
    return LoadedTransformersModel(
        spec, decoder, attention, dtype, device, directory, max_model_len, AdapterMemory()
    )


def _compare(check: PagedCheck, decoder: TransformersModel, tolerance: float) -> None:
    name = decoder.spec.architecture
    try:
        difference = check.differs(decoder, tolerance)
        depends = difference is None and check.depends_on_rows(decoder)
    except Exception as error:  # whatever the code of hundreds of models raises
        logger.debug("%s fails over paged KV", name, exc_info=error)
        raise NotPaged(
            f"{name} fails over paged KV ({type(error).__name__}: {first_line(error)})"
        ) from None
    if difference is not None:
        raise NotPaged(f"{name} cannot be paged: {difference}")
    if depends:
        logger.warning(
            "%s is not deterministic here: its own code computes a row to other bits beside other "
            "rows, so a request's neighbours may change its tokens",
            name,
        )


def choose_dtype(config: EngineConfig, directory: Path, traced: TracedModel) -> torch.dtype:
    """Return the dtype of the weights; a checkpoint's files are opened, and damage is found."""
    checkpoint = None
    if config.load_format != "dummy":
        checkpoint = Checkpoint(directory, allow_pickle=config.allow_pickle)
    named = traced.config.get_text_config().dtype or traced.config.dtype
    chosen: torch.dtype | None
    if config.dtype != "auto":
        chosen = getattr(torch, config.dtype)
    elif isinstance(named, torch.dtype):
        chosen = named
    else:
        chosen = torch.float32 if checkpoint is None else checkpoint.first_dtype()
    if chosen not in TOLERANCES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in TOLERANCES)
        raise ConfigError(f"the checkpoint's dtype is {chosen} but must be one of {allowed}")
    return chosen


def _not_packed(model: torch.nn.Module, names: frozenset[str]) -> list[str]:
    return [n for n in sorted(names) if not isinstance(model.get_submodule(n), PackedModule)]
