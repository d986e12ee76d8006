"""Weighted sums of rows that lie anywhere: out[t] = sum over j of weights[t, j] rows[places[t, j]].

In float32, in the order of j, and rounded once. Knows nothing of experts.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_gated
from octavo_kernels._native.library import element_code, library_for, strides_of
from octavo_kernels._register import register


def weighted_sum_reference(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Add up rows [n, size] at places [tokens, count] times weights [tokens, count]."""
    total = torch.zeros(len(places), rows.shape[1], dtype=torch.float32, device=rows.device)
    # Not torch's own sum: it adds in an order of its own.
    for place, weight in zip(places.T, weights.T, strict=True):
        total += rows[place].float() * weight[:, None]
    return total.to(rows.dtype)


def weighted_sum(
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up some rows for each token, each row times a weight.

    Args:
        rows: [n, size], float32, bfloat16 or float16, rows contiguous.
        places: [tokens, count] int64, contiguous, each in [0, n); on a GPU what is not so counts as
            a row of zeros.
        weights: [tokens, count] float32, contiguous.
        out: Receives the result, [tokens, size] of the rows' dtype, apart from the rows.

    Returns:
        `out`, or a new tensor [tokens, size].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: On a CPU, a place is not as above; nothing is written then.
    """
    check_tensor("weighted_sum: rows", rows, (None, None))
    check_tensor(
        "weighted_sum: places", places, (None, None), dtypes=(torch.int64,), beside=rows, packed=2
    )
    check_tensor(
        *("weighted_sum: weights", weights, places.shape),
        dtypes=(torch.float32,),
        beside=rows,
        packed=2,
    )
    shape = (places.shape[0], rows.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    else:
        check_tensor("weighted_sum: out", out, shape, like=rows)
    _weighted_sum(rows, places, weights, out)
    return out


@register("weighted_sum", "Tensor rows, Tensor places, Tensor weights, Tensor(a!) out")
def _weighted_sum(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `weighted_sum` of checked tensors into `out`."""
    capability = gpu_capability(rows)
    if capability is not None:
        from octavo_kernels._triton.weighted_sum import launch_weighted_sum

        launch_weighted_sum(rows, places, weights, out, choose_gated(capability))
        return
    library = library_for(rows)
    if library is None:
        out.copy_(weighted_sum_reference(rows, places, weights))
        return
    invalid = library.octavo_weighted_sum(
        element_code(rows.dtype),
        *(rows.data_ptr(), places.data_ptr(), weights.data_ptr(), out.data_ptr()),
        *(len(rows), len(places), places.shape[1], rows.shape[1]),
        strides_of(rows.stride(0), out.stride(0)),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise IndexError(
            f"weighted_sum: places of token {invalid} are {places[invalid].tolist()} but must be in"
            f" [0, {len(rows) - 1}]"
        )
