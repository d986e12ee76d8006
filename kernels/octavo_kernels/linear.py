"""Linear layer: y = x @ W^T + b, summed in float32 and rounded once.

On a GPU the bits of a row do not depend on how many rows there are, nor on what they hold, which
torch's own product, choosing its routine by the number of rows, does not promise. Knows nothing of
layers or models, nor of how a CPU packs its weights.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._linear_launch import choose_linear
from octavo_kernels._register import register


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [rows, in] by weight [out, in] transposed, and add bias [out]."""
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight; on a GPU, whatever the other rows are, to the same bits.

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
    capability = gpu_capability(x)
    if capability is None:
        out.copy_(linear_reference(x, weight, bias))
        return
    from octavo_kernels._triton.linear import launch_linear

    launch_linear(x, weight, bias, out, choose_linear(x.element_size(), capability))
