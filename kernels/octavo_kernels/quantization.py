"""A weight in 8 bits an element: integers or floating-point numbers, times a scale of each output.

A scale is the largest magnitude of an output's weights / the largest that the type holds: 127 of
int8, whose -128 is not used, and 448 of float8_e4m3fn. Where that magnitude is below 2^-100, all
elements are 0. Knows nothing of products.
"""

import torch

from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import Architecture
from octavo_kernels._linear_launch import weight_types

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
"""The types."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_MAGNITUDE = 2.0**-100
_NAMES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}
_ELEMENTS_AT_ONCE = 2**24


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements, of the shape of values [..., size], and their scale, float32 [..., 1].

    Elements of what is not finite mean nothing; its scale is not finite.
    """
    wide, largest = values.float(), _LARGEST[dtype]
    magnitude = wide.abs().amax(dim=-1, keepdim=True)
    # A number / a tensor would be the rounded reciprocal times the number.
    quotient = torch.full_like(magnitude, largest) / magnitude
    inverse = torch.where(magnitude < _LEAST_MAGNITUDE, 0.0, quotient)
    scaled = wide * inverse
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), magnitude / largest


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in 8 bits, as `linear` takes it, and its scales [out] float32.

    What is allocated meanwhile does not grow with the weight.

    Args:
        weight: Not kept.
        dtype: One of EIGHT_BITS.
    """
    elements = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        elements[rows], own = quantize(weight[rows], dtype)
        scales[rows] = own[:, 0]
    return elements, scales


def quantized_types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return which of EIGHT_BITS the weights of a GPU's kernels may have; none elsewhere."""
    capability = gpu_capability(torch.empty(0, device=device))
    return () if capability is None else types_of_weights(capability)


def types_of_weights(capability: Architecture) -> tuple[torch.dtype, ...]:
    """Return which of EIGHT_BITS the weights of an architecture's kernels may have."""
    return tuple(_NAMES[name] for name in weight_types(capability))
