"""Finds what serving a model takes, by the code that a load chooses and sizes by.

No weight is read. Knows nothing of how a report is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotMade
from octavo.executor.model_runner import widest_window
from octavo.model.devices import rank_devices
from octavo.model.lora_list import adapter_directories, survey_adapter
from octavo.model.lora_reader import adaptable_layers
from octavo.model.quantization import choose_quantization
from octavo.model.shard import WHOLE, ModelPart
from octavo.model.spec import ModelSpec
from octavo.model.tiers import Tier, choose_tier, why_not_served
from octavo.model_check.features import features_off
from octavo.model_check.glimpse import Glimpse, glimpse
from octavo.model_check.needs import Needs, native_needs, traced_needs
from octavo.model_check.report import AdapterVerdict, Memory, ModelReport
from octavo.model_check.room import blocks_of_sequence, num_blocks


def check_model(config: EngineConfig) -> ModelReport:
    """Return what serving the model that `config` names takes, without reading its weights.

    Raises:
        ConfigError: it cannot be served so; the message says why. Adapters that are refused are
            in the report.
    """
    with glimpse(config) as seen:
        tier = choose_tier(seen.directory, config)
        try:
            if tier.name == "static":
                # Imported late: other models need no more of transformers than a config.
                from octavo.model_check.static import check_static

                return check_static(config, seen, tier)
            return _check_paged(config, seen, tier)
        except NotMade as error:
            raise why_not_served(config, tier, error) from None


def _check_paged(config: EngineConfig, seen: Glimpse, tier: Tier) -> ModelReport:
    devices = rank_devices(config)
    needs = native_needs(config, seen) if tier.traced is None else traced_needs(config, seen, tier)
    choose_quantization(config.quantization, needs.dtype, devices[0])
    off = features_off(
        *(config, tier.name, needs.dtype, devices[0], needs.spec),
        reads_images=seen.reads_images,
    )
    return ModelReport(
        model=config.model,
        architecture=needs.architecture,
        tier=tier.name,
        reason=tier.reason,
        dtype=str(needs.dtype).removeprefix("torch."),
        quantization=config.quantization,
        device=", ".join(dict.fromkeys(map(str, devices))),
        num_ranks=config.num_ranks,
        max_model_len=needs.max_model_len,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        memory=_memory(config, seen, needs, devices),
        off=off,
        adapters=tuple(_adapters(config, needs.spec)),
    )


def _adapters(config: EngineConfig, spec: ModelSpec | None) -> Iterator[AdapterVerdict]:
    """Yield what each adapter of the list takes, or why not; reads them all, as a load does."""
    if not config.enable_lora:
        return
    assert spec is not None, "adapters take the native decoder"
    shapes = adaptable_layers(ModelPart.of(spec, WHOLE))
    for name, directory in adapter_directories(config).items():
        try:
            found = survey_adapter(name, directory, shapes, config.max_lora_rank)
        except ConfigError as error:
            yield AdapterVerdict(name, None, str(error))
        else:
            yield AdapterVerdict(name, found.num_bytes)


def _memory(
    config: EngineConfig, seen: Glimpse, needs: Needs, devices: tuple[torch.device, ...]
) -> Memory:
    window = widest_window(needs.windows)
    largest = max(shape.bytes_per_block for shape in needs.shapes)
    return Memory(
        file_bytes=seen.file_bytes,
        weight_bytes=max(needs.weight_bytes),
        kv_bytes_per_token=largest // config.block_size,
        row_bytes=0,
        num_blocks=num_blocks(config, needs.shapes, needs.weight_bytes, devices),
        blocks_per_sequence=blocks_of_sequence(needs.max_model_len, config.block_size, window),
    )
