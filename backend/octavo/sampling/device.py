"""Small arrays to the device and small results back, without waiting for it.

Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes; a GPU's kernels are compiled anew for addresses that are not multiples of it."""


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return tensors like the arrays on a device, copied there at once.

    On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for array, start in zip(arrays, starts, strict=True):
        packed.numpy()[start : start + array.nbytes] = array.view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, starts, strict=True)
    ]


class HostCopy:
    """Copies of tensors of one device on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [_start_copy(tensor) for tensor in tensors]
        device = tensors[0].device
        on_host = device.type == "cpu"
        self._done = None if on_host else torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[list[Any]]:
        """Wait until they have arrived, and return them as lists."""
        if self._done is not None:
            self._done.synchronize()
        return [copy.tolist() for copy in self._copies]


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
