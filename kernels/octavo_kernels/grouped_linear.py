"""Products of rows in groups, each group with a weight of its own: y = x @ W[group]^T.

Rows lie sorted by group; where a group's rows begin is told, and a group may have none. A row's
bits depend on its own data and its group's weight alone, as those of `linear` do: not on what else
is in its group, nor on how many groups there are. Knows nothing of experts or adapters, nor of how
a CPU packs its weights.
"""

from itertools import pairwise

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._linear_launch import choose_linear
from octavo_kernels._register import register
from octavo_kernels.linear import check_weight, linear, linear_reference


def grouped_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows [starts[g], starts[g + 1]) of x [rows, in] by weight [groups, out, in][g].

    Each sum is multiplied by its scale of scales [groups, out]. Rows of no group become zero.
    """
    out = x.new_zeros(len(x), weight.shape[1])
    for group, (first, end) in enumerate(pairwise(starts.tolist())):
        own = None if scales is None else scales[group]
        out[first:end] = linear_reference(x[first:end], weight[group], scales=own)
    return out


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows by its weight.

    Args:
        x: [rows, in], float32, bfloat16 or float16, rows contiguous, apart from each other as they
            like.
        weight: [groups, out, in] of x's dtype, contiguous; or of 8 bits, if it has scales.
        starts: [groups + 1] int64 on x's device: group g has the rows from starts[g] to
            starts[g + 1]. Ascending, in [0, rows]; on a GPU what is not so is not noticed, and
            reaches no memory outside.
        scales: [groups, out] float32 of a weight of 8 bits, contiguous, else None; see `linear`.
        out: Receives the result, [rows, out] of x's dtype, apart from x. Rows of no group, before
            the first and after the last, stay as they are.

    Returns:
        `out`, or a new tensor [rows, out], whose rows of no group are not written.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: On a CPU, a group's rows are not as above.
    """
    check_tensor("grouped_linear: x", x, (None, None))
    check_weight("grouped_linear", weight, scales, (None, None, x.shape[1]), x)
    shape, int64 = (x.shape[0], weight.shape[1]), (torch.int64,)
    starts_shape = (weight.shape[0] + 1,)
    check_tensor("grouped_linear: starts", starts, starts_shape, dtypes=int64, beside=x)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("grouped_linear: out", out, shape, like=x)
    _grouped_linear(x, weight, scales, starts, out)
    return out


@register(
    "grouped_linear", "Tensor x, Tensor weight, Tensor? scales, Tensor starts, Tensor(a!) out"
)
def _grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute `grouped_linear` of checked tensors into `out`."""
    capability = gpu_capability(x)
    if capability is not None:
        from octavo_kernels._triton.grouped_linear import launch_grouped_linear

        config = choose_linear(x.element_size(), capability, of_8_bits=scales is not None)
        launch_grouped_linear(x, weight, starts, out, config, scales)
        return
    bounds = list(pairwise(starts.tolist()))
    for group, (first, end) in enumerate(bounds):
        if not 0 <= first <= end <= len(x):
            raise group_error("grouped_linear", group, starts, len(x))
    for group, (first, end) in enumerate(bounds):
        if first < end:
            own = None if scales is None else scales[group]
            linear(x[first:end], weight[group], scales=own, out=out[first:end])


def group_error(operation: str, group: int, starts: torch.Tensor, rows: int) -> IndexError:
    """Return the error for a group whose rows are not within [0, rows) after those before it."""
    first, end = starts[group : group + 2].tolist()
    return IndexError(
        f"{operation}: group {group} has rows from {first} to {end} but starts must ascend within "
        f"[0, {rows}]"
    )
