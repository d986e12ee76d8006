"""Linear layer of 8-bit integers: y = x @ W^T + b, of a weight and rows that are quantised.

All inputs of one output of the weight are integers in [-127, 127] times a scale; so is each group
of 64 neighbouring inputs of a row, which is quantised when it is multiplied. A row's integers
depend on the row alone. A scale is the largest magnitude / 127; where that is below 2^-100 / 127,
all integers are 0.

The sum of a group's products is exact. It is turned into float32, multiplied by the group's scale
and added to those before it; what comes of the last is multiplied by the output's scale, then the
bias is added. So this and native code, whatever its instructions, give the same bits.
`pack_weight(to_int8=True)` packs for the latter.
"""

import torch
import torch.nn.functional as F

GROUP_INPUTS = 64
_LARGEST = 127
_LEAST_MAGNITUDE = 2.0**-100


def quantize_reference(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers, int8 of the shape of values [..., size], and their scale, float32 [..., 1].

    Integers of what is not finite mean nothing; its scale is not finite.
    """
    wide = values.float()
    magnitude = wide.abs().amax(dim=-1, keepdim=True)
    # A number / a tensor would be the rounded reciprocal times the number.
    quotient = torch.full_like(magnitude, _LARGEST) / magnitude
    inverse = torch.where(magnitude < _LEAST_MAGNITUDE, 0.0, quotient)
    return (wide * inverse).round().to(torch.int8), magnitude / _LARGEST


def int8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [rows, in] by weight [out, in] transposed, both quantised, and add bias [out]."""
    padding = (0, -x.shape[1] % GROUP_INPUTS)
    integers, scales = quantize_reference(weight)
    weights = torch.split(F.pad(integers, padding).double(), GROUP_INPUTS, dim=1)
    total = torch.zeros(len(x), len(weight))
    for group, weights_of_group in zip(
        torch.split(F.pad(x, padding), GROUP_INPUTS, dim=1), weights, strict=True
    ):
        own, scale = quantize_reference(group)
        total += (own.double() @ weights_of_group.T).float() * scale
    total *= scales[:, 0]
    return (total + (0.0 if bias is None else bias.float())).to(x.dtype)
