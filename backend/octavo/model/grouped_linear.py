"""`GroupedLinear`: weights of one shape, of which each group of rows has its own.

On a CPU weights are laid out for this package's native code as they come, and no plain form is
kept; elsewhere, and where native code does not serve, plain weights are multiplied by. A row's bits
depend on nothing but the row and its group's weight. Knows nothing of experts or checkpoints.
"""

from __future__ import annotations

import torch

from octavo.model.layers import packed_bytes
from octavo_kernels import (
    grouped_linear,
    make_packed_groups,
    pack_group,
    packed_grouped_linear,
    packed_grouped_silu,
    silu_and_mul,
)


class GroupedLinear:
    """Multiply groups of rows, each by a weight of its own; what was not filled is not defined.

    Args:
        shape: groups, outputs and inputs.
        dtype: of the weights.
        device: of the weights.
        is_gated: as `octavo_kernels.make_packed_groups` takes it.
        to_int8: whether to quantise; only where `octavo_kernels.packs_weights`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_gated: bool = False,
        to_int8: bool = False,
    ) -> None:
        self.num_bytes = packed_bytes(shape, dtype, to_int8=to_int8)
        """What all weights take, but for padding."""
        is_cpu = device.type == "cpu"
        self._packed = (
            make_packed_groups(shape, dtype, is_gated=is_gated, to_int8=to_int8) if is_cpu else None
        )
        assert self._packed is not None or not to_int8, f"{dtype} cannot be packed"
        is_plain = self._packed is None
        self._plain = torch.empty(shape, dtype=dtype, device=device) if is_plain else None

    def fill(self, group: int, weight: torch.Tensor) -> None:
        """Give a group its weight [out, in], contiguous, which is not kept."""
        if self._packed is not None:
            pack_group(self._packed, group, weight)
        else:
            assert self._plain is not None
            self._plain[group] = weight

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T of each row's group, [rows, out].

        Args:
            x: [rows, in], sorted by group.
            starts: [groups + 1] int64: group g has the rows from starts[g] to starts[g + 1].
        """
        if self._packed is not None:
            return packed_grouped_linear(x, self._packed, starts)
        assert self._plain is not None
        return grouped_linear(x, self._plain, starts)

    def silu(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half of each product times the other half, [rows, out / 2]."""
        if self._packed is not None:
            return packed_grouped_silu(x, self._packed, starts)
        return silu_and_mul(self(x, starts))
