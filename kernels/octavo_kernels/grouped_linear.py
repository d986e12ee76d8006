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
from octavo_kernels.linear import linear, linear_reference


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply rows [starts[g], starts[g + 1]) of x [rows, in] by weight [groups, out, in][g].

    Rows of no group become zero.
    """
    out = x.new_zeros(len(x), weight.shape[1])
    for group, (first, end) in enumerate(pairwise(starts.tolist())):
        out[first:end] = linear_reference(x[first:end], weight[group])
    return out


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows by its weight.

    Args:
        x: [rows, in], float32, bfloat16 or float16, rows contiguous, apart from each other as they
            like.
        weight: [groups, out, in] of x's dtype, contiguous.
        starts: [groups + 1] int64 on x's device: group g has the rows from starts[g] to
            starts[g + 1]. Ascending, in [0, rows]; on a GPU what is not so is not noticed, and
            reaches no memory outside.
        out: Receives the result, [rows, out] of x's dtype, apart from x. Rows of no group, before
            the first and after the last, stay as they are.

    Returns:
        `out`, or a new tensor [rows, out], whose rows of no group are not written.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: On a CPU, a group's rows are not as above.
    """
    check_tensor("grouped_linear: x", x, (None, None))
    check_tensor("grouped_linear: weight", weight, (None, None, x.shape[1]), like=x, packed=3)
    shape, int64 = (x.shape[0], weight.shape[1]), (torch.int64,)
    starts_shape = (weight.shape[0] + 1,)
    check_tensor("grouped_linear: starts", starts, starts_shape, dtypes=int64, beside=x)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("grouped_linear: out", out, shape, like=x)
    _grouped_linear(x, weight, starts, out)
    return out


@register("grouped_linear", "Tensor x, Tensor weight, Tensor starts, Tensor(a!) out")
def _grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `grouped_linear` of checked tensors into `out`."""
    capability = gpu_capability(x)
    if capability is not None:
        from octavo_kernels._triton.grouped_linear import launch_grouped_linear

        config = choose_linear(x.element_size(), capability)
        launch_grouped_linear(x, weight, starts, out, config)
        return
    bounds = list(pairwise(starts.tolist()))
    for group, (first, end) in enumerate(bounds):
        if not 0 <= first <= end <= len(x):
            raise group_error("grouped_linear", group, starts, len(x))
    for group, (first, end) in enumerate(bounds):
        if first < end:
            linear(x[first:end], weight[group], out=out[first:end])


def group_error(operation: str, group: int, starts: torch.Tensor, rows: int) -> IndexError:
    """Return the error for a group whose rows are not within [0, rows) after those before it."""
    first, end = starts[group : group + 2].tolist()
    return IndexError(
        f"{operation}: group {group} has rows from {first} to {end} but starts must ascend within "
        f"[0, {rows}]"
    )
