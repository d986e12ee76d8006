"""The part `products`: row-independent products against torch's own and against what bounds both.

The bound is the larger of two times: that of moving weights, inputs and results once, at the rate
of a copy, and that of the operations at the rate of a large product by torch.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F

from gpu.ceilings import copy_bytes_per_s, product_flops_per_s
from gpu.context import Context
from gpu.report import Line, Section
from gpu.timing import time_work
from octavo_kernels import linear, quantize_weight, quantized_types
from octavo_kernels.quantization import EIGHT_BITS

_WEIGHTS = {  # of Llama-3-8B: outputs and inputs
    "queries, keys, values": (6144, 4096),
    "attention's result": (4096, 4096),
    "gate and up": (28_672, 4096),
    "down": (4096, 14_336),
    "vocabulary": (128_256, 4096),
}


def products(context: Context) -> list[Section]:
    """Time each weight of a layer with few and many rows."""
    torch.manual_seed(8)
    weights = _WEIGHTS if context.is_gpu else {"tiny": (64, 32)}
    counts = (1, 32, 256, 4096) if context.is_gpu else (1, 5)
    ceilings = copy_bytes_per_s(context.device), product_flops_per_s(context.device)
    lines = []
    for (name, sizes), rows in itertools.product(weights.items(), counts):
        if not context.is_late:
            lines.append(_line(name, sizes, rows, ceilings, context.device))
    notes = (
        f"bfloat16. A copy moves {ceilings[0] / 1e9:,.0f} GB/s, a large product runs at "
        f"{ceilings[1] / 1e12:,.1f} TFLOP/s. `linear` is what `deterministic=true` takes; the last "
        "two are `linear` too, of weights in 8 bits.",
    )
    heads = ("weight", "rows", "linear, µs", "bound's share", "torch, µs", "of torch's speed")
    heads += ("int8 weight, µs", "fp8 weight, µs")
    return [Section("Products with weights", heads, tuple(lines), notes, is_speed=True)]


def _line(
    name: str,
    sizes: tuple[int, int],
    rows: int,
    ceilings: tuple[float, float],
    device: torch.device,
) -> Line:
    outer, inner = sizes
    weight = torch.randn(outer, inner, device=device).bfloat16()
    x = torch.randn(rows, inner, device=device).bfloat16()
    ours_s = time_work(lambda: linear(x, weight), device)
    torch_s = time_work(lambda: F.linear(x, weight), device)
    moved_bytes = 2 * (outer * inner + rows * (outer + inner))
    bound_s = max(moved_bytes / ceilings[0], 2 * rows * outer * inner / ceilings[1])
    figures = (
        f"{ours_s * 1e6:,.1f}",
        f"{bound_s / ours_s:.0%}",
        f"{torch_s * 1e6:,.1f}",
        f"{torch_s / ours_s:.0%}",
    )
    return Line((name, str(rows), *figures, *_of_8_bits(x, weight)))


def _of_8_bits(x: torch.Tensor, weight: torch.Tensor) -> list[str]:
    """Return the microseconds of the product with the weight in each type of 8 bits."""
    served = quantized_types(x.device) if x.is_cuda else EIGHT_BITS
    figures = []
    for kind in EIGHT_BITS:
        if kind not in served:
            figures.append("not served")
            continue
        elements, scales = quantize_weight(weight, kind)
        work = partial(linear, x, elements, scales=scales)
        figures.append(f"{time_work(work, x.device) * 1e6:,.1f}")
    return figures
