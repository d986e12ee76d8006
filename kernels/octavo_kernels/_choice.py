"""The one switch between fast paths and references, and the choice of a GPU's kernels.

Knows no operation.
"""

import functools
import importlib.util
import logging
import os

import torch

from octavo_kernels._launch import Architecture

_logger = logging.getLogger(__name__)


@functools.cache
def wants_reference() -> bool:
    """Say whether OCTAVO_KERNELS=reference asks for plain torch everywhere; read once.

    Raises:
        ValueError: OCTAVO_KERNELS has another value.
    """
    choice = os.environ.get("OCTAVO_KERNELS", "")
    if choice not in ("", "reference"):
        raise ValueError(f"OCTAVO_KERNELS is {choice!r} but must be unset or 'reference'")
    return choice == "reference"


@functools.cache
def _has_language() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        _logger.warning("using slow torch operations on the GPU: the Triton language is missing")
    return found


def gpu_capability(tensor: torch.Tensor) -> Architecture | None:
    """Return the architecture that kernels for this tensor are launched on, else None.

    None when the tensor is not on a GPU, when plain torch is asked for, and, after one warning,
    when the Triton language is not installed. Its kernels run on the current device.
    """
    if tensor.device.type != "cuda" or wants_reference() or not _has_language():
        return None
    return _capability(tensor.device)


@functools.cache
def _capability(device: torch.device) -> Architecture:
    if torch.version.hip is not None:
        return amd_architecture(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def amd_architecture(name: str) -> Architecture:
    """Return an AMD architecture of a name that tells its features too, as torch gives it."""
    return name.split(":")[0]
