"""Which device each rank computes on, by the options and by what this machine has.

Knows nothing of how ranks are started or of what they compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from octavo.config import EngineConfig
from octavo.device_numbers import read_device_numbers
from octavo.errors import ConfigError, shown


def rank_devices(
    config: EngineConfig, count_devices: Callable[[], int] = torch.cuda.device_count
) -> tuple[torch.device, ...]:
    """Return the device of each rank, in order of rank.

    CUDA devices are those that `devices` names, else the first ones; both are numbered as
    CUDA_VISIBLE_DEVICES leaves them. `auto` is CUDA wherever there is a device, however many are
    missing: no model lands on a CPU for want of one. Ranks that Ray places have no numbers yet.

    Args:
        config: the options.
        count_devices: says how many CUDA devices this process sees.

    Raises:
        ConfigError: it does not see all of them, or none for itself.
    """
    if config.device == "cpu":
        return (torch.device("cpu"),) * config.num_ranks
    count = count_devices()
    if config.device == "auto" and config.devices is None and not count:
        return (torch.device("cpu"),) * config.num_ranks
    if config.is_over_ray and count:
        return (torch.device("cuda"),) * config.num_ranks
    numbers = _numbers(config)
    if max(numbers) >= count:
        raise ConfigError(f"{_asked(config)} but this machine has {count} CUDA devices{_shown()}")
    return tuple(torch.device("cuda", number) for number in numbers)


def device_of_gpu(gpu: str, environment: Mapping[str, str]) -> torch.device:
    """Return the device of this process that is a GPU which Ray has reserved.

    Args:
        gpu: what Ray calls it: by CUDA_VISIBLE_DEVICES of the node, where that is set, else by its
            number.
        environment: of this process.

    Raises:
        ConfigError: this process does not see it, or by another name.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is None and gpu.isdecimal():
        return torch.device("cuda", int(gpu))
    if names is None or gpu not in names:
        raise ConfigError(
            f"Ray has reserved GPU {shown(gpu)} but CUDA_VISIBLE_DEVICES of this process is "
            f"{'not set' if visible is None else shown(visible)}; start Ray on this node and the "
            "server with the same"
        )
    return torch.device("cuda", names.index(gpu))


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread, which comes before any work on it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _numbers(config: EngineConfig) -> tuple[int, ...]:
    if config.devices is not None:
        return read_device_numbers(config.devices, config.num_ranks)
    if config.num_ranks > 1:
        return tuple(range(config.num_ranks))
    return (int(config.device.partition(":")[2] or 0),)


def _asked(config: EngineConfig) -> str:
    """Return which options ask for devices."""
    if config.devices is not None:
        return f"option devices is {config.devices!r}"
    if config.num_ranks > 1 and not config.is_over_ray:
        return f"tensor_parallel_size times pipeline_parallel_size is {config.num_ranks}"
    return f"option device is {config.device!r}"


def _shown() -> str:
    """Return what hides devices from this process, if anything does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {shown(visible)})"
