"""`GroupedLinear`: weights of one shape, of which each group of rows has its own.

On a CPU weights are laid out for this package's native code as they come, and no plain form is
kept; elsewhere, and where native code does not serve, plain weights are multiplied by, or those of
8 bits that `quantize_weight` makes. A row's bits depend on nothing but the row and its group's
weight. Knows nothing of experts or checkpoints.
"""

from __future__ import annotations

import torch

from octavo.model.layers import packed_bytes
from octavo_kernels import (
    PackedGroups,
    grouped_linear,
    make_packed_groups,
    pack_group,
    packed_grouped_linear,
    packed_grouped_silu,
    quantize_weight,
    silu_and_mul,
)


class GroupedLinear:
    """Multiply groups of rows, each by a weight of its own; what was not filled is not defined.

    Args:
        shape: groups, outputs and inputs.
        dtype: of the weights.
        device: of the weights.
        is_gated: as `octavo_kernels.make_packed_groups` takes it.
        stored_as: as `PackedLinear` takes it.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_gated: bool = False,
        stored_as: torch.dtype | None = None,
    ) -> None:
        is_quantized = stored_as is not None
        self.num_bytes = packed_bytes(shape, dtype, of_8_bits=is_quantized)
        """What all weights take, but for padding."""
        self._packed: PackedGroups | None = None
        if device.type == "cpu" and stored_as in (None, torch.int8):
            self._packed = make_packed_groups(shape, dtype, is_gated=is_gated, to_int8=is_quantized)
        self._plain: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None
        if self._packed is None:
            self._plain = torch.empty(shape, dtype=stored_as or dtype, device=device)
        if self._packed is None and is_quantized:
            self._scales = torch.empty(shape[:2], dtype=torch.float32, device=device)

    def fill(self, group: int, weight: torch.Tensor) -> None:
        """Give a group its weight [out, in], contiguous, which is not kept."""
        if self._packed is not None:
            pack_group(self._packed, group, weight)
        else:
            assert self._plain is not None
            if self._scales is None:
                self._plain[group] = weight
            else:
                quantized = quantize_weight(weight, self._plain.dtype)
                self._plain[group], self._scales[group] = quantized

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T of each row's group, [rows, out].

        Args:
            x: [rows, in], sorted by group.
            starts: [groups + 1] int64: group g has the rows from starts[g] to starts[g + 1].
        """
        if self._packed is not None:
            return packed_grouped_linear(x, self._packed, starts)
        assert self._plain is not None
        return grouped_linear(x, self._plain, starts, scales=self._scales)

    def silu(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half of each product times the other half, [rows, out / 2]."""
        if self._packed is not None:
            return packed_grouped_silu(x, self._packed, starts)
        return silu_and_mul(self(x, starts))
