"""What a model of the traditional mode takes, as far as its shapes tell.

Knows nothing of how a report is shown.
"""

from __future__ import annotations

import torch

from octavo.config import EngineConfig
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.model.devices import rank_devices
from octavo.model.packed_modules import weight_bytes
from octavo.model.pretrained import PretrainedModel, make_without_weights
from octavo.model.tiers import Tier
from octavo.model_check.features import features_off
from octavo.model_check.glimpse import Glimpse
from octavo.model_check.needs import unnamed_dtype
from octavo.model_check.report import Memory, ModelReport
from octavo.model_check.room import memory_left
from octavo.static_engine.memory import RowBytes, choose_num_blocks, measure_row
from octavo.static_engine.refusals import check_options


def check_static(config: EngineConfig, seen: Glimpse, tier: Tier) -> ModelReport:
    """Return what serving a model in the traditional mode takes.

    Raises:
        ConfigError: it cannot be served so; the message says why.
    """
    check_options(config)
    (device,) = rank_devices(config)
    model = make_without_weights(config, seen.directory, _dtype(config, seen))
    max_model_len = model.max_model_len * (1 + model.is_encoder_decoder)
    return ModelReport(
        model=config.model,
        architecture=model.name,
        tier=tier.name,
        reason=tier.reason,
        dtype=str(model.module.dtype).removeprefix("torch."),
        quantization=config.quantization,
        device=str(device),
        num_ranks=1,
        max_model_len=max_model_len,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        memory=_memory(config, seen, model, max_model_len, device),
        off=features_off(
            config, tier.name, model.module.dtype, device, reads_images=seen.reads_images
        ),
    )


def _dtype(config: EngineConfig, seen: Glimpse) -> torch.dtype:
    """Return the dtype of the weights; files that are there are opened, and damage is found."""
    found = torch.float32 if config.load_format == "dummy" else None
    if seen.has_weights:
        found = Checkpoint(seen.directory, allow_pickle=config.allow_pickle).first_dtype()
    values = read_json(seen.directory / "config.json")
    named = values.get("dtype") or values.get("torch_dtype")
    if config.dtype != "auto" or named is not None:
        name = str(named) if config.dtype == "auto" else config.dtype
        found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise unnamed_dtype(config)
    return found


def _memory(
    config: EngineConfig,
    seen: Glimpse,
    model: PretrainedModel,
    max_model_len: int,
    device: torch.device,
) -> Memory:
    own_bytes = weight_bytes(model.module, of_8_bits=False)
    memory = memory_left(device, own_bytes)
    row = _measure(model)
    num_blocks = None
    if row is not None:
        reserved_bytes = 0 if device.type == "cpu" else own_bytes
        num_blocks = choose_num_blocks(config, row, max_model_len, device, memory, reserved_bytes)
    return Memory(
        file_bytes=seen.file_bytes,
        weight_bytes=own_bytes,
        kv_bytes_per_token=None if row is None else row.per_token,
        row_bytes=0 if row is None else row.fixed,
        num_blocks=num_blocks,
        blocks_per_sequence=-(-max_model_len // config.block_size),
    )


def _measure(model: PretrainedModel) -> RowBytes | None:
    """Return what a row takes, or None where only weights can tell."""
    try:
        return measure_row(model)
    except Exception:  # a model's own code may raise anything on the meta device
        return None
