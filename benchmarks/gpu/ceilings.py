"""What a device reaches at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import torch

from gpu.timing import time_work


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the rate of a copy within the device's memory, of bytes read and bytes written."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 23), dtype=torch.int8).to(device)
    target = torch.empty_like(source)
    seconds = time_work(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds


def product_flops_per_s(device: torch.device) -> float:
    """Return the rate of a large product of random bfloat16 matrices by torch."""
    size = 8192 if device.type == "cuda" else 256
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    seconds = time_work(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / seconds
