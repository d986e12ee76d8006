"""Products with weights of 8 bits, as row_operations lists the other operations."""

from __future__ import annotations

import torch

from gpu.row_operations import Drawer, Function, RowOperation, Tensors
from octavo_kernels import (
    grouped_linear,
    grouped_linear_reference,
    linear,
    linear_reference,
    quantize_weight,
    quantized_types,
)
from octavo_kernels.quantization import EIGHT_BITS

_SIZES = ((100, 33), (4096, 1024))


def quantized_operations(device: torch.device) -> list[RowOperation]:
    """Return them, for the types of weights that the device's kernels take; on a CPU for all."""
    return [
        RowOperation(
            f"{name} of {kind}, {inner} to {outer}", _draw(inner, outer, kind), compute, reference
        )
        for kind in quantized_types(device) or EIGHT_BITS
        for inner, outer in _SIZES
        for name, compute, reference in (
            ("linear", _linear, _linear_reference),
            ("grouped_linear", _grouped(grouped_linear), _grouped(grouped_linear_reference)),
        )
    ]


def _draw(inner: int, outer: int, kind: torch.dtype) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        elements, scales = quantize_weight(torch.randn(outer, inner) / inner**0.5, kind)
        return (torch.randn(rows, inner).to(dtype),), (elements, scales, torch.randn(outer))

    return draw


def _linear(
    x: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return linear(x, elements, bias.to(x.dtype), scales=scales)


def _linear_reference(
    x: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return linear_reference(x, elements, bias.to(x.dtype), scales)


def _grouped(multiply: Function) -> Function:
    def compute(
        x: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        starts = torch.tensor([0, len(x)], device=x.device)
        product: torch.Tensor = multiply(x, elements[None], starts, scales=scales[None])
        return product

    return compute
