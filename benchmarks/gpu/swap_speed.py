"""The part `swap`: how fast KV blocks leave for the host and come back.

Beside it stands one copy of the same bytes between contiguous memory, pinned on the host: what the
bus gives at best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from gpu.context import Context
from gpu.report import Line, Section
from gpu.timing import Work, time_work
from octavo_kernels import KVCacheShape, make_attention_backend


@dataclass(frozen=True, slots=True)
class Swapped:
    """What is copied: so many blocks of one shape."""

    name: str
    shape: KVCacheShape
    num_blocks: int


def swap(context: Context) -> list[Section]:
    """Time copies of neighbouring and of scattered blocks, out and in."""
    small = KVCacheShape(30, 3, 64, 16, torch.bfloat16)
    large = KVCacheShape(32, 8, 128, 16, torch.bfloat16)
    cases = [
        Swapped("Llama-3-8B, 2 MiB", large, 128),
        Swapped("SmolLM2-135M, 360 KiB", small, 512),
    ]
    if not context.is_gpu:
        cases = [Swapped("tiny", KVCacheShape(2, 2, 16, 16, torch.bfloat16), 8)]
    lines = [line for case in cases for line in _lines(case, context) if not context.is_late]
    heads = ("block", "blocks", "where", "out, GB/s", "in, GB/s", "of one copy, out", "in")
    return [Section("Swapping", heads, tuple(lines), is_speed=True)]


def _lines(case: Swapped, context: Context) -> list[Line]:
    backend = make_attention_backend(case.shape, context.device)
    count = case.num_blocks
    device, host = backend.allocate(2 * count), backend.allocate(2 * count, host=True)
    best = [
        _rate(
            lambda: host.storage[:count].copy_(device.storage[:count], non_blocking=True),
            case,
            context,
        ),
        _rate(
            lambda: device.storage[:count].copy_(host.storage[:count], non_blocking=True),
            case,
            context,
        ),
    ]
    torch.manual_seed(6)
    near, order = torch.arange(count), torch.randperm(2 * count)
    far, other = order[:count], order[count:]
    places = {
        "side by side": (near, near),
        "scattered on the device": (far, near),
        "scattered on both": (far, other),
    }
    lines = []
    for name, (on_device, on_host) in places.items():
        out, back = torch.stack((on_device, on_host), 1), torch.stack((on_host, on_device), 1)
        rates = [
            _rate(partial(backend.copy_blocks, device, host, out), case, context),
            _rate(partial(backend.copy_blocks, host, device, back), case, context),
        ]
        figures = [f"{rate / 1e9:.1f}" for rate in rates]
        shares = [f"{rate / most:.0%}" for rate, most in zip(rates, best, strict=True)]
        lines.append(Line((case.name, str(count), name, *figures, *shares)))
    return lines


def _rate(work: Work, case: Swapped, context: Context) -> float:
    """Return bytes per second."""
    seconds = time_work(work, context.device, captured=False)
    return case.num_blocks * case.shape.bytes_per_block / seconds
