"""Linear layer: y = x @ W^T + b, summed in float32 and rounded once.

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

_TILE_ROWS = 32
#: With fewer outputs than 12, MKL gives a float32 row other bits in another place among the rows.
_MIN_OUTPUTS = 16


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [rows, in] by weight [out, in] transposed, and add bias [out]."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight, each to the same bits whatever the others are.

    Args:
        x: [rows, in], float32, bfloat16 or float16, rows contiguous, apart from each other as they
            like.
        weight: [out, in] of x's dtype, contiguous.
        bias: [out] of x's dtype, or None.
        out: Receives the result, [rows, out] of x's dtype, apart from x.

    Returns:
        `out`, or a new tensor [rows, out].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_tensor("linear: x", x, (None, None))
    check_tensor("linear: weight", weight, (None, x.shape[1]), like=x, packed=2)
    if bias is not None:
        check_tensor("linear: bias", bias, weight.shape[:1], like=x)
    shape = (x.shape[0], weight.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("linear: out", out, shape, like=x)
    _linear(x, weight, bias, out)
    return out


@register("linear", "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out")
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute `linear` of checked tensors into `out`."""
    if wants_reference():
        out.copy_(linear_reference(x, weight, bias))
        return
    capability = gpu_capability(x)
    if capability is None:
        _multiply_tiles(x, weight, bias, out)
        return
    from octavo_kernels._triton.linear import launch_linear

    launch_linear(x, weight, bias, out, choose_linear(x.element_size(), capability))


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
