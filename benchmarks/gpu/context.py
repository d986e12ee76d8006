"""What every part of the check is told."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """The machine, and how much of it may be used.

    On a CPU everything has tiny sizes: it is how the check itself is tested.
    """

    device: torch.device
    quick: bool = False
    """Fewer cases."""
    deadline_s: float = float("inf")
    """Of `time.monotonic`: what has not begun by then is left out."""

    @property
    def is_gpu(self) -> bool:
        """Whether the kernels of a GPU are checked."""
        return self.device.type == "cuda"

    @property
    def num_devices(self) -> int:
        """Devices that ranks may have; on a CPU a few processes stand for them."""
        if self.is_gpu:
            return torch.cuda.device_count()
        return 2 if self.quick else 4

    @property
    def is_late(self) -> bool:
        """Whether nothing more should be begun."""
        return time.monotonic() > self.deadline_s

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Types that operations are checked with."""
        if self.quick:
            return (torch.bfloat16,)
        return (torch.float32, torch.bfloat16, torch.float16)

    def dtypes_of(self, served: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
        """Return those of an operation that serves only some types, one of them at least."""
        return tuple(dtype for dtype in self.dtypes if dtype in served) or served[:1]
