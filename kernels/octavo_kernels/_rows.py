"""What normalisations share: rows of up to three dimensions, and where they lie.

Knows no operation.
"""

import torch

from octavo_kernels._check import FLOAT_DTYPES, check_tensor


def check_rows(name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Raise ValueError unless the operation `name` takes these; return `out`, made if None."""
    if not 1 <= x.dim() <= 3:
        raise ValueError(f"{name}: x has {x.dim()} dimensions but must have 1 to 3")
    check_tensor(f"{name}: x", x, (None,) * x.dim(), dtypes=FLOAT_DTYPES)
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor(f"{name}: out", out, x.shape, like=x)
    return out


def row_counts(x: torch.Tensor) -> tuple[int, int]:
    """Return how many outer and inner rows a tensor of up to three dimensions has."""
    return x.shape[0] if x.dim() > 1 else 1, x.shape[1] if x.dim() == 3 else 1


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Return the outer and inner stride of its rows."""
    if x.dim() == 1:
        return 0, 0
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0
