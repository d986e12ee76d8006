"""Gated activation: y = silu(gate) * up, where silu(z) = z / (1 + e^-z).

Computed in float32 and rounded once. Knows nothing of layers or models.
"""

import torch

from octavo_kernels._gated import check_gate_up, register_gated


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply silu of the first half of gate_up [tokens, 2 * inner] by the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    # Not torch's own silu: what it makes of a number depends on where a thread's share ends.
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


_silu_and_mul = register_gated("silu_and_mul", silu_and_mul_reference)


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
    out = check_gate_up("silu_and_mul", gate_up, out)
    _silu_and_mul(gate_up, out)
    return out
