"""Layer normalisation: y = (x - mean) / sqrt(variance + eps) * weight + bias, of each row.

Sums are in float32, the variance is that of what is left when the mean is taken off, and results
are rounded once. Knows nothing of layers or models.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_rms_norm
from octavo_kernels._native.library import element_code, library_for, strides_of
from octavo_kernels._register import register
from octavo_kernels._rows import check_rows, row_counts, row_strides


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise x [..., hidden] by mean and variance, scale it by weight, add bias [hidden]."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    factor = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * factor * weight + bias).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise x by its mean and variance, scale it by weight and add bias.

    Args:
        x: [hidden], [tokens, hidden] or [tokens, heads, hidden], float32, bfloat16 or float16; the
            last dimension contiguous, the others strided as they like.
        weight: [hidden] float32.
        bias: Like weight.
        eps: Added to the variance.
        out: Receives the result, shape and dtype of x; may be x.

    Returns:
        `out`, or a new contiguous tensor like x.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or a GPU's rows are longer
            than 16384.
    """
    out = check_rows("layer_norm", x, out)
    for name, factors in (("weight", weight), ("bias", bias)):
        check_tensor(
            f"layer_norm: {name}", factors, x.shape[-1:], dtypes=(torch.float32,), beside=x
        )
    _layer_norm(x, weight, bias, eps, out)
    return out


@register("layer_norm", "Tensor x, Tensor weight, Tensor bias, float eps, Tensor(a!) out")
def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Compute `layer_norm` of checked tensors into `out`."""
    capability = gpu_capability(x)
    if capability is not None:
        from octavo_kernels._triton.layer_norm import launch_layer_norm

        # Rows are held as those of an RMS norm are.
        launch_layer_norm((x, weight, bias, out), eps, choose_rms_norm(x.shape[-1], capability))
        return
    library = library_for(x)
    if library is None:
        out.copy_(layer_norm_reference(x, weight, bias, eps))
        return
    library.octavo_layer_norm(
        element_code(x.dtype),
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        *row_counts(x),
        x.shape[-1],
        strides_of(*row_strides(x), *row_strides(out)),
        eps,
        torch.get_num_threads(),
    )
