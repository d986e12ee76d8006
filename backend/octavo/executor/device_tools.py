"""What a runner does in another way on each kind of device, chosen in one place.

Knows nothing of the model beyond whether its steps can be recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.executor.device_inputs import DeviceInputs, HostInputs, StagedInputs, StepSizes
from octavo.executor.graphs import CudaRecorder, DecodeGraphs
from octavo.model.devices import use_device
from octavo.model.interface import CausalModel
from octavo_kernels import KVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceTools:
    """How a device is given its work."""

    steps_ahead: int
    """Steps that may be under way while the next one is planned: none where the host computes."""
    inputs: DeviceInputs
    """The way of every step's inputs."""
    make_graphs: Callable[[CausalModel[Any], KVCache], DecodeGraphs] | None = None
    """Makes graphs that read `inputs`, with none recorded; None where decode steps run like all
    others."""


def make_device_inputs(device: torch.device, sizes: StepSizes) -> DeviceInputs:
    """Return the way of every step's inputs to a device, on the current stream of this thread."""
    return StagedInputs.on_cuda(sizes, device) if device.type == "cuda" else HostInputs()


def make_device_tools(
    device: torch.device, model: CausalModel[Any], sizes: StepSizes
) -> DeviceTools:
    """Return the tools of a device; a CUDA device becomes the current one of this thread."""
    if device.type != "cuda":
        return DeviceTools(steps_ahead=0, inputs=HostInputs())
    use_device(device)
    inputs = StagedInputs.on_cuda(sizes, device)
    if not model.recordable:
        logger.warning(
            "decode steps do not run as CUDA graphs: %s, with attention %r, reads on the host what "
            "the device holds",
            model.spec.architecture,
            model.attention.name,
        )
        return DeviceTools(steps_ahead=1, inputs=inputs)
    return DeviceTools(
        steps_ahead=1,
        inputs=inputs,
        make_graphs=lambda decoder, kv_cache: DecodeGraphs(
            decoder, kv_cache, inputs, CudaRecorder(device)
        ),
    )
