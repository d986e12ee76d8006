"""Rows of a packed weight, as they were before it was packed: out[i] = W[rows[i]].

Where an embedding is the weight of the vocabulary projection too, the packed form of that serves
both, and no plain one need be kept. Knows nothing of layers or models.
"""

import ctypes

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._native.attention import library_named
from octavo_kernels._native.library import element_code
from octavo_kernels._register import register
from octavo_kernels.packed_linear import NativeLinear, PackedWeight


def packed_embedding(weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a packed weight, to the bit what was packed.

    Args:
        weight: What `pack_weight` returned, packed neither as gated nor as 8-bit integers.
        rows: [n] int64, contiguous, each in [0, out).

    Returns:
        A new tensor [n, in] of the weight's dtype.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or the weight is packed so.
        IndexError: A row is outside.
    """
    if weight.is_gated:
        raise ValueError("packed_embedding: weight is packed as gated but must not be")
    if weight.is_int8:
        raise ValueError("packed_embedding: weight is packed as 8-bit integers but must not be")
    check_tensor(
        "packed_embedding: rows", rows, (None,), dtypes=(torch.int64,), beside=weight.panels
    )
    out = weight.panels.new_empty(rows.shape[0], weight.in_features)
    _packed_embedding(weight.panels, rows, out, weight.out_features, weight.instructions)
    return out


@register(
    "packed_embedding",
    "Tensor panels, Tensor rows, Tensor(a!) out, int out_features, str instructions",
)
def _packed_embedding(
    panels: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    out_features: int,
    instructions: str,
) -> None:
    """Copy checked rows into `out`."""
    weight = NativeLinear(panels.data_ptr(), None, out.shape[1], out_features, False)
    invalid = library_named(instructions).octavo_embedding(
        element_code(panels.dtype),
        ctypes.byref(weight),
        *(rows.data_ptr(), len(rows), out.data_ptr()),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise IndexError(
            f"packed_embedding: row is {int(rows[invalid])} but must be in [0, {out_features - 1}]"
        )
