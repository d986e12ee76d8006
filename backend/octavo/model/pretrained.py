"""A checkpoint as transformers' own classes load it, checked tensor by tensor.

Knows nothing of batches, sequences or how the model is run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.config import EngineConfig
from octavo.errors import ConfigError, shown
from octavo.model.checkpoint import read_json
from octavo.model.devices import rank_devices
from octavo.model.location import PICKLES, checkpoint_directory

#: Positions that a model says it has, by the names that its config may give them.
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_NAMES_SHOWN = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model of transformers on its device, and what those around it need to know."""

    module: Any
    """A `transformers.PreTrainedModel` in evaluation mode."""
    device: torch.device
    is_encoder_decoder: bool
    eos_token_ids: tuple[int, ...]
    context: int | None
    """Positions that it has, in tokens; None where it has no limit, or says none."""

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.module).__name__


def load_pretrained(config: EngineConfig) -> PretrainedModel:
    """Load the checkpoint that `config.model` names, which may not be `demo`.

    Raises:
        ConfigError: transformers has no class for it, its code is not trusted, its weights are
            quantized, or they are not exactly those of the class.
    """
    trust = config.trust_remote_code
    directory = checkpoint_directory(
        config.model, trust_remote_code=trust, allow_pickle=config.allow_pickle
    )
    values = read_json(directory / "config.json")
    _check_config(values, directory, trust)
    _check_files(directory, config.allow_pickle)
    _log_as_we_do()
    (device,) = rank_devices(config)
    try:
        hf_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust)
        factory = (
            transformers.AutoModelForSeq2SeqLM
            if getattr(hf_config, "is_encoder_decoder", False)
            else transformers.AutoModelForCausalLM
        )
        module, loaded = factory.from_pretrained(
            directory,
            config=hf_config,
            dtype=config.dtype,
            trust_remote_code=trust,
            output_loading_info=True,
            # Refused below, by name.
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # a model's own code may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"transformers cannot load {directory}: {reason}") from error
    _check_tensors(directory, loaded)
    _check_class(directory, module, values)
    return PretrainedModel(
        module.eval().to(device),
        device,
        bool(module.config.is_encoder_decoder),
        _eos_token_ids(module),
        _context(module.config.get_text_config()),
    )


def _check_config(values: Mapping[str, Any], directory: Path, trust: bool) -> None:
    method = values.get("quantization_config")
    if method:
        name = method.get("quant_method") if isinstance(method, Mapping) else method
        raise ConfigError(
            f"the checkpoint is quantized ({shown(name)} in quantization_config), which is not "
            "supported; use bfloat16, float16 or float32 weights"
        )
    known = values.get("model_type") in transformers.CONFIG_MAPPING
    if values.get("auto_map") and not known and not trust:
        raise ConfigError(
            f"{directory / 'config.json'} says that code of its own (auto_map) belongs to the "
            "model; set option trust_remote_code to true if you trust where it comes from"
        )


def _check_files(directory: Path, allow_pickle: bool) -> None:
    if any(directory.glob("*.safetensors")) or allow_pickle:
        return
    if any(any(directory.glob(pattern)) for pattern in PICKLES):
        raise ConfigError(
            f"{directory} holds only pickled weights, which are refused because such files can "
            "carry code; convert them to safetensors, or set option allow_pickle to true if you "
            "trust where they come from"
        )
    raise ConfigError(f"weights {directory / 'model.safetensors'} do not exist")


def _check_tensors(directory: Path, loaded: Mapping[str, Any]) -> None:
    faults = {
        "missing": loaded.get("missing_keys"),
        "unexpected": loaded.get("unexpected_keys"),
        "wrong shape": [key for key, *_ in loaded.get("mismatched_keys") or ()],
    }
    texts = [f"{fault}: {_some(sorted(names))}" for fault, names in faults.items() if names]
    if texts:
        raise ConfigError(f"the tensors in {directory} do not fit its config; {'; '.join(texts)}")


def _check_class(directory: Path, module: Any, values: Mapping[str, Any]) -> None:
    """Refuse what would not generate text, or be loaded as another model than it is."""
    name, named = type(module).__name__, values.get("architectures") or []
    if named and name not in named:
        raise ConfigError(
            f"{directory / 'config.json'} names the architecture {shown(named[0])}, which does not "
            f"generate text by itself; transformers would make {name} of it"
        )
    if not module.can_generate() or module.main_input_name != "input_ids":
        raise ConfigError(f"{name} does not generate text from token ids")


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, or else of the config."""
    ids = module.generation_config.eos_token_id
    if ids is None:
        ids = getattr(module.config.get_text_config(), "eos_token_id", None)
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _context(config: Any) -> int | None:
    limits = (getattr(config, name, None) for name in _CONTEXT_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _log_as_we_do() -> None:
    """Have what transformers says come through the log, and nothing be drawn over it."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
