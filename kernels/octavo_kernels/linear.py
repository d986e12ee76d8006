"""Linear layer: y = x @ W^T + b, summed in float32 and rounded once.

A weight may have 8 bits an element, int8 or float8_e4m3fn, and a scale of each output, as
`quantize_weight` makes them: y = (x @ W^T) * s + b. An element of such a weight is converted to the
dtype of the rows as it is read, which holds it exactly, and each sum is scaled once.

The bits of a row depend neither on how many rows there are nor on what they hold. Torch's own
product does not promise that, for it chooses its routine by the number of rows; so where no kernel
serves, it is given the same number of rows each time. Knows nothing of layers or models, nor of how
a CPU packs its weights.
"""

import torch
import torch.nn.functional as F

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability, wants_reference
from octavo_kernels._linear_launch import choose_linear
from octavo_kernels._register import register
from octavo_kernels.quantization import EIGHT_BITS

_TILE_ROWS = 32
#: With fewer outputs than 12, MKL gives a float32 row other bits in another place among the rows.
_MIN_OUTPUTS = 16


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [rows, in] by weight [out, in] transposed, by scales [out], and add bias [out]."""
    product = F.linear(x.float(), weight.float())
    if scales is not None:
        product *= scales
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight, each to the same bits whatever the others are.

    Args:
        x: [rows, in], float32, bfloat16 or float16, rows contiguous, apart from each other as they
            like.
        weight: [out, in] of x's dtype, contiguous; or of 8 bits, if it has scales.
        bias: [out] of x's dtype, or None.
        scales: [out] float32 of a weight of 8 bits, contiguous, else None.
        out: Receives the result, [rows, out] of x's dtype, apart from x.

    Returns:
        `out`, or a new tensor [rows, out].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_tensor("linear: x", x, (None, None))
    check_weight("linear", weight, scales, (None, x.shape[1]), x)
    if bias is not None:
        check_tensor("linear: bias", bias, weight.shape[:1], like=x)
    shape = (x.shape[0], weight.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("linear: out", out, shape, like=x)
    _linear(x, weight, bias, scales, out)
    return out


def check_weight(
    operation: str,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    shape: tuple[int | None, ...],
    x: torch.Tensor,
) -> None:
    """Refuse a weight for rows x that has not this shape, or not the type that its scales ask for.

    Raises:
        ValueError: It or its scales do not fit.
    """
    name = f"{operation}: weight"
    if scales is None:
        check_tensor(name, weight, shape, like=x, packed=len(shape))
        return
    check_tensor(name, weight, shape, dtypes=EIGHT_BITS, beside=x, packed=len(shape))
    name, outer = f"{operation}: scales", weight.shape[:-1]
    check_tensor(name, scales, outer, dtypes=(torch.float32,), beside=x, packed=len(outer))


@register("linear", "Tensor x, Tensor weight, Tensor? bias, Tensor? scales, Tensor(a!) out")
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute `linear` of checked tensors into `out`."""
    if wants_reference():
        out.copy_(linear_reference(x, weight, bias, scales))
        return
    capability = gpu_capability(x)
    if capability is None:
        _multiply_plainly(x, weight, bias, scales, out)
        return
    from octavo_kernels._triton.linear import launch_linear

    config = choose_linear(x.element_size(), capability, of_8_bits=scales is not None)
    launch_linear(x, weight, bias, out, config, scales)


def _multiply_plainly(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply by torch's own products, a weight of 8 bits in float32."""
    if scales is None:
        _multiply_tiles(x, weight, bias, out)
        return
    product = torch.empty_like(out, dtype=torch.float32)
    _multiply_tiles(x.float(), weight.float(), None, product)
    product *= scales
    out.copy_(product if bias is None else product + bias.float())


def _multiply_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Multiply a fixed number of rows at a time by torch's own product, the last ones padded."""
    rows, outputs = out.shape
    padded = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS))
    if outputs < _MIN_OUTPUTS:
        weight = F.pad(weight, (0, 0, 0, _MIN_OUTPUTS - outputs))
        bias = None if bias is None else F.pad(bias, (0, _MIN_OUTPUTS - outputs))
    for first in range(0, rows, _TILE_ROWS):
        product = F.linear(padded[first : first + _TILE_ROWS], weight, bias)
        out[first : first + _TILE_ROWS] = product[: rows - first, :outputs]
