"""Small arrays to the device and small results back, without waiting for it.

Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes; a GPU's kernels are compiled anew for addresses that are not multiples of it."""


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on a device like the arrays, of one dimension each, by one copy of all.

    On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pinned=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[Any]], *, pinned: bool = False) -> torch.Tensor:
    """Return the bytes of arrays, one behind the other, each where it is aligned."""
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays, starts, strict=False):
        packed.numpy()[start : start + array.nbytes] = array.view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Return tensors like the arrays that were packed, which share the memory of `packed`."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return where each array begins, and where all end, in bytes."""
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return list(accumulate(sizes, initial=0))


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
