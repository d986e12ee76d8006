"""Gated activation: y = gelu(gate) * up, by the approximation with tanh.

gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3))). Computed in float32 and
rounded once. Knows nothing of layers or models.
"""

import math

import torch

from octavo_kernels._gated import check_gate_up, register_gated


def gelu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply gelu of the first half of gate_up [tokens, 2 * inner] by the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    # Not torch's own gelu: what it makes of a number depends on where a thread's share ends.
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (gate / 2 * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)


_gelu_and_mul = register_gated("gelu_and_mul", gelu_and_mul_reference)


def gelu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply gelu of the first half of each row by its second half.

    Args:
        gate_up: [tokens, 2 * inner], float32, bfloat16 or float16, rows contiguous; gate, then up.
        out: Receives the result, [tokens, inner] of gate_up's dtype, apart from gate_up.

    Returns:
        `out`, or a new tensor [tokens, inner].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    out = check_gate_up("gelu_and_mul", gate_up, out)
    _gelu_and_mul(gate_up, out)
    return out
