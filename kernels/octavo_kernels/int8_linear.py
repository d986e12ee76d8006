"""Linear layer of 8-bit integers: y = x @ W^T + b, of a weight and rows that are quantised.

All inputs of one output of the weight are integers in [-127, 127] times a scale, as
`quantize_weight` makes them; so is each group of 64 neighbouring inputs of a row, which is
quantised when it is multiplied. A row's integers depend on the row alone.

The sum of a group's products is exact. It is turned into float32, multiplied by the group's scale
and added to those before it; what comes of the last is multiplied by the output's scale, then the
bias is added. So this and native code, whatever its instructions, give the same bits.
`pack_weight(to_int8=True)` packs for the latter.
"""

import torch
import torch.nn.functional as F

from octavo_kernels.quantization import quantize

GROUP_INPUTS = 64


def int8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [rows, in] by weight [out, in] transposed, both quantised, and add bias [out]."""
    padding = (0, -x.shape[1] % GROUP_INPUTS)
    integers, scales = quantize(weight, torch.int8)
    weights = torch.split(F.pad(integers, padding).double(), GROUP_INPUTS, dim=1)
    total = torch.zeros(len(x), len(weight))
    for group, weights_of_group in zip(
        torch.split(F.pad(x, padding), GROUP_INPUTS, dim=1), weights, strict=True
    ):
        own, scale = quantize(group, torch.int8)
        total += (own.double() @ weights_of_group.T).float() * scale
    total *= scales[:, 0]
    return (total + (0.0 if bias is None else bias.float())).to(x.dtype)
