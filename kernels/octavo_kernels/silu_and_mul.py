"""Gated activation: y = silu(gate) * up, where silu(z) = z / (1 + e^-z).

Computed in float32 and rounded once. Knows nothing of layers or models.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._native.library import library_for, strides_of


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply silu of the first half of gate_up [tokens, 2 * inner] by the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply silu of the first half of each row by its second half.

    Args:
        gate_up: [tokens, 2 * inner], float32, bfloat16 or float16, rows contiguous; gate, then up.
        out: Receives the result, [tokens, inner] of gate_up's dtype, apart from gate_up.

    Returns:
        `out`, or a new tensor [tokens, inner].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_tensor("silu_and_mul: gate_up", gate_up, (None, None))
    tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"silu_and_mul: gate_up has {width} columns but must have an even number")
    shape = (tokens, width // 2)
    if out is None:
        out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    else:
        check_tensor("silu_and_mul: out", out, shape, like=gate_up)
    library = library_for(gate_up)
    if library is None:
        return out.copy_(silu_and_mul_reference(gate_up))
    library.octavo_silu_and_mul(
        gate_up.dtype == torch.bfloat16,
        gate_up.data_ptr(),
        out.data_ptr(),
        *shape,
        strides_of(gate_up.stride(0), out.stride(0)),
        torch.get_num_threads(),
    )
    return out
