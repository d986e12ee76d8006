"""A checkpoint as transformers' own class loads and runs it.

Knows nothing of batches, sequences or what becomes of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.config import EngineConfig
from octavo.errors import NotMade, first_line, shown
from octavo.model.checkpoint import Checkpoint
from octavo.model.devices import rank_devices
from octavo.model.hf_config import read_hf_config
from octavo.model.loader import (
    choose_max_model_len,
    end_tokens,
    log_weights,
    read_model_config,
)
from octavo.model.location import configured_checkpoint
from octavo.model.packed_modules import weight_bytes
from octavo.model.pretrained_weights import load_weights
from octavo.model.transformers_advice import silence_advice

#: Of a model that has no limit of its own, or says none; in tokens, unless `max_model_len` is.
DEFAULT_CONTEXT = 4096
#: Positions that a model has, by the names that its config may give them.
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model of transformers on its device, and what those around it need to know."""

    module: Any
    """A `transformers.PreTrainedModel` in evaluation mode."""
    device: torch.device
    is_encoder_decoder: bool
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Positions, in tokens; where there is an encoder, its own and as many of the decoder."""

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.module).__name__


def load_pretrained(config: EngineConfig) -> PretrainedModel:
    """Load the checkpoint that `config.model` names, which may not be `demo`.

    Raises:
        NotMade: transformers has no class for it that generates text.
        ConfigError: its code is not trusted, its weights are quantized or not exactly those of the
            class, or the device is not there.
    """
    trust = config.trust_remote_code
    directory = configured_checkpoint(config)
    named = read_model_config(directory, trust_remote_code=trust).get("architectures") or []
    (device,) = rank_devices(config)
    if config.load_format != "dummy":
        # Opens every file of weights, and refuses what is damaged or may not be read.
        Checkpoint(directory, allow_pickle=config.allow_pickle)
    hf_config = read_hf_config(directory, trust_remote_code=trust)
    dtype = _dtype(config, hf_config)
    module = load_weights(_factory(hf_config), directory, hf_config, config, dtype=dtype)
    _check_class(module, named)
    log_weights(weight_bytes(module, of_8_bits=False), module.dtype)
    return _pretrained(config, directory, module.to(device), device)


def make_without_weights(
    config: EngineConfig, directory: Path, dtype: torch.dtype
) -> PretrainedModel:
    """Return the model of a checkpoint's config on torch's meta device, where it has shapes alone.

    Args:
        config: the options.
        directory: of the checkpoint's configs.
        dtype: of the model.

    Raises:
        NotMade: transformers has no class for it that generates text.
        ConfigError: its code is not trusted, or its weights are quantized.
    """
    trust = config.trust_remote_code
    named = read_model_config(directory, trust_remote_code=trust).get("architectures") or []
    hf_config = read_hf_config(directory, trust_remote_code=trust)
    try:
        with torch.device("meta"):
            module = _factory(hf_config).from_config(
                hf_config, dtype=dtype, trust_remote_code=trust
            )
    except Exception as error:  # whatever the code of hundreds of models raises
        raise NotMade(
            f"transformers cannot make the model of {directory}: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from None
    _check_class(module, named)
    return _pretrained(config, directory, module, torch.device("meta"))


def _factory(hf_config: Any) -> Any:
    """Return what makes the model of a config that generates text."""
    if hf_config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _pretrained(
    config: EngineConfig, directory: Path, module: Any, device: torch.device
) -> PretrainedModel:
    silence_advice()
    text = module.config.get_text_config()
    return PretrainedModel(
        module.eval(),
        device,
        module.config.is_encoder_decoder,
        end_tokens(directory, getattr(text, "eos_token_id", None)),
        _max_model_len(config, text),
    )


def _dtype(config: EngineConfig, hf_config: Any) -> torch.dtype | str:
    """Return the dtype of the weights: `auto` is that of the files, where the config names none."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    return hf_config.dtype or ("auto" if config.load_format != "dummy" else torch.float32)


def _check_class(module: Any, named: list[str]) -> None:
    """Refuse what would not generate text, or be loaded as another model than it is."""
    name = type(module).__name__
    if named and name not in named:
        raise NotMade(
            f"the checkpoint's architecture is {shown(named[0])}, which does not generate text; "
            f"transformers would make {name} of it"
        )
    if not module.can_generate() or module.main_input_name != "input_ids":
        raise NotMade(f"{name} does not generate text from token ids")


def _max_model_len(config: EngineConfig, text: Any) -> int:
    limits = (getattr(text, name, None) for name in _CONTEXT_FIELDS)
    limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if limit is None:
        return config.max_model_len or DEFAULT_CONTEXT
    return choose_max_model_len(config, limit)
