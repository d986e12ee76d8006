"""Engine options of a model instance, from what Triton says about it.

Knows nothing of what the options mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError

#: Parameters of config.pbtxt that the Python backend itself reads.
_BACKEND_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")


def read_config(args: Mapping[str, str], environment: Mapping[str, str]) -> EngineConfig:
    """Return the options of the instance that `args` of `initialize` describe.

    Raises:
        ConfigError: an option is unknown or wrong, or contradicts the instance group.
    """
    model_config = json.loads(args["model_config"])
    parameters = {
        name: value["string_value"]
        for name, value in model_config.get("parameters", {}).items()
        if name not in _BACKEND_PARAMETERS
    }
    engine_json = Path(args["model_repository"], args["model_version"], "engine.json")
    config = EngineConfig.load(engine_json, parameters, environment)
    kind = args["model_instance_kind"]
    if config.num_ranks > 1 and kind != "MODEL":
        raise ConfigError(
            f"instance_group kind is KIND_{kind} but must be KIND_MODEL where tensor_parallel_size "
            f"times pipeline_parallel_size is {config.num_ranks}"
        )
    device = _device(config.device, kind, args["model_instance_device_id"])
    multi_lora = config.multi_lora or str(engine_json.with_name("multi_lora.json"))
    return replace(config, device=device, multi_lora=multi_lora if config.enable_lora else None)


def _device(option: str, kind: str, device_id: str) -> str:
    """Return the device that option and instance group agree on."""
    if kind == "MODEL":
        return option
    if kind not in ("CPU", "GPU"):
        raise ConfigError(
            f"instance_group kind is KIND_{kind} but must be KIND_CPU, KIND_GPU or KIND_MODEL"
        )
    if kind == "GPU" and not device_id.isdecimal():
        raise ConfigError(f"instance_group names GPU {device_id!r} but must name one from 0 up")
    device = "cpu" if kind == "CPU" else f"cuda:{device_id}"
    if option not in ("auto", device, device.partition(":")[0]):
        raise ConfigError(
            f"option device is {option!r} but the instance_group is of KIND_{kind} on {device}; "
            "set device to 'auto' or the kind to KIND_MODEL"
        )
    return device
