"""Has transformers read the weights of one of its models, and holds it to every tensor.

It knows what each architecture's tensors have been called over the years. Knows nothing of any
architecture, or of how a model is run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotMade, first_line
from octavo.model.checkpoint import Checkpoint
from octavo.model.dummy_weights import warn_of_dummy_weights
from octavo.model.load_progress import transformers_logged
from octavo.model.tensor_check import refuse_faults

#: How many times what files hold a model may be, as some share tensors, and what is always allowed.
_MOST_TIMES = 4
_SMALL = 2**24

logger = logging.getLogger(__name__)


def load_weights(
    factory: Any,
    directory: Path,
    hf_config: PreTrainedConfig,
    config: EngineConfig,
    **how: Any,
) -> PreTrainedModel:
    """Return a model with the checkpoint's weights, or with random ones for `load_format: dummy`.

    Args:
        factory: of transformers, such as `AutoModelForCausalLM`.
        directory: the checkpoint.
        hf_config: its config.
        config: the engine's options.
        how: what the factory is to be told beside, a `dtype` among it.

    Raises:
        NotMade: transformers cannot make the model, or not read its tensors.
        ConfigError: tensors are missing, of a wrong shape or not the model's.
    """
    how["trust_remote_code"] = config.trust_remote_code
    try:
        if config.load_format == "dummy":
            return _draw(factory, directory, hf_config, how)
        _check_size(factory, directory, hf_config, config)
        with transformers_logged():
            model, info = factory.from_pretrained(
                directory,
                config=hf_config,
                use_safetensors=any(directory.glob("*.safetensors")),
                local_files_only=True,
                # Refused below, by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **how,
            )
    except ConfigError:
        raise
    except Exception as error:  # whatever the code of hundreds of models raises
        raise NotMade(
            f"transformers cannot load {directory}: {type(error).__name__}: {first_line(error)}"
        ) from None
    _check_tensors(directory, info)
    loaded: PreTrainedModel = model
    return loaded


def _draw(
    factory: Any, directory: Path, hf_config: PreTrainedConfig, how: dict[str, Any]
) -> PreTrainedModel:
    """Return the model with weights that are always the same."""
    warn_of_dummy_weights(directory)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel = factory.from_config(hf_config, **how)
    return model


def _check_size(
    factory: Any, directory: Path, hf_config: PreTrainedConfig, config: EngineConfig
) -> None:
    """Refuse a config that makes a far larger model than its files hold.

    Transformers draws what the files do not have, so a config alone could take all memory. A model
    that cannot be made without weights is not judged.
    """
    held = Checkpoint(directory, allow_pickle=config.allow_pickle).num_elements()
    try:
        with torch.device("meta"):
            model = factory.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever the code of hundreds of models raises
        logger.debug("%s is not made without weights", directory, exc_info=error)
        return
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > _MOST_TIMES * held + _SMALL:
        raise ConfigError(
            f"the config in {directory} makes a model of {wanted:,} parameters but its files hold "
            f"{held:,}"
        )


def _check_tensors(directory: Path, info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's."""
    faults = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "wrong shape": [
            f"{name} {list(found)} instead of {list(wanted)}"
            for name, found, wanted in sorted(info["mismatched_keys"])
        ],
        "damaged": sorted(info["error_msgs"]),
    }
    refuse_faults(str(directory), faults)
