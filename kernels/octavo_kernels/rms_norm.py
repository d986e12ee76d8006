"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

`add_rms_norm` first adds x to the residual stream. Sums are in float32 and results are rounded
once. Weights are float32 whatever they scale, for a model may store what is to be added to one.
Knows nothing of layers or models.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_rms_norm
from octavo_kernels._native.library import element_code, library_for, strides_of
from octavo_kernels._register import register
from octavo_kernels._rows import check_rows, row_counts, row_strides


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x [..., hidden] by its root mean square and scale it by weight [hidden]."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise x by its root mean square and scale it by weight.

    Args:
        x: [hidden], [tokens, hidden] or [tokens, heads, hidden], float32, bfloat16 or float16; the
            last dimension contiguous, the others strided as they like.
        weight: [hidden] float32.
        eps: Added to the mean square.
        out: Receives the result, shape and dtype of x; may be x.

    Returns:
        `out`, or a new contiguous tensor like x.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or a GPU's rows are longer
            than 16384.
    """
    out = check_rows("rms_norm", x, out)
    check_tensor("rms_norm: weight", weight, x.shape[-1:], dtypes=(torch.float32,), beside=x)
    _rms_norm(x, weight, eps, out)
    return out


@register("rms_norm", "Tensor x, Tensor weight, float eps, Tensor(a!) out")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Compute `rms_norm` of checked tensors into `out`."""
    capability = gpu_capability(x)
    if capability is not None:
        from octavo_kernels._triton.rms_norm import launch_rms_norm

        launch_rms_norm(x, weight, eps, out, choose_rms_norm(x.shape[-1], capability))
        return
    library = library_for(x)
    if library is None:
        out.copy_(rms_norm_reference(x, weight, eps))
        return
    library.octavo_rms_norm(
        element_code(x.dtype),
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *row_counts(x),
        x.shape[-1],
        strides_of(*row_strides(x), *row_strides(out)),
        eps,
        torch.get_num_threads(),
    )


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual, all [tokens, hidden]; return the sum normalised, and the sum."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and normalise the sum, rounded to its dtype first.

    Args:
        x: [tokens, hidden], float32, bfloat16 or float16, rows contiguous.
        residual: Like x.
        weight: [hidden] float32.
        eps: Added to the mean square.
        out: Receives the normalised sum; may be x.
        residual_out: Receives the sum; may be residual.

    Returns:
        `(normed, residual)`, in `out` and `residual_out` or in new tensors.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or a GPU's rows are longer
            than 16384.
    """
    check_tensor("add_rms_norm: x", x, (None, None))
    check_tensor("add_rms_norm: residual", residual, x.shape, like=x)
    check_tensor("add_rms_norm: weight", weight, x.shape[-1:], dtypes=(torch.float32,), beside=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("add_rms_norm: out", out, x.shape, like=x)
    check_tensor("add_rms_norm: residual_out", residual_out, x.shape, like=x)
    _add_rms_norm(x, residual, weight, eps, out, residual_out)
    return out, residual_out


@register(
    "add_rms_norm",
    "Tensor x, Tensor residual, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) residual_out",
)
def _add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
) -> None:
    """Compute `add_rms_norm` of checked tensors into `out` and `residual_out`."""
    tensors = (x, residual, weight, out, residual_out)
    capability = gpu_capability(x)
    if capability is not None:
        from octavo_kernels._triton.rms_norm import launch_add_rms_norm

        launch_add_rms_norm(tensors, eps, choose_rms_norm(x.shape[1], capability))
        return
    library = library_for(x)
    if library is None:
        normed, total = add_rms_norm_reference(x, residual, weight, eps)
        out.copy_(normed)
        residual_out.copy_(total)
        return
    library.octavo_add_rms_norm(
        element_code(x.dtype),
        *[tensor.data_ptr() for tensor in tensors],
        *x.shape,
        strides_of(x.stride(0), residual.stride(0), out.stride(0), residual_out.stride(0)),
        eps,
        torch.get_num_threads(),
    )
