"""What adapters add to a linear layer's product on a CPU, packed for its instructions.

    product[row] += x[row] @ down^T @ up^T          of the row's own adapter

In float32, in the order of the inputs and then of the ranks; the sum is added to the product as it
was rounded, and rounded again: a row's bits depend on its own data and adapter alone. Each adapter
of a table has memory of its own, and may be replaced. Knows nothing of where adapters come from.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._native.attention import library_named
from octavo_kernels._native.library import element_code, strides_of
from octavo_kernels._register import register
from octavo_kernels.grouped_linear import group_error
from octavo_kernels.linear import linear_reference
from octavo_kernels.packed_linear import NativeLinear, PackedWeight

_FLOAT32, _INT64 = (torch.float32,), (torch.int64,)
_FIELDS = 4  # of LowRank in adapters.h: three pointers and a number


class NativeAdaptedRows(ctypes.Structure):
    """AdaptedRows of adapters.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("rows", "starts")],
        *[(name, ctypes.c_int64) for name in ("count", "num_adapters")],
    ]


@dataclass(frozen=True)
class PackedLowRank:
    """One adapter's part in one linear layer, as adapters.h has it."""

    down: torch.Tensor
    """One-dimensional, float32."""
    up: torch.Tensor
    """The same."""
    spans: torch.Tensor
    """Which ranks go into which outputs."""
    vectors: int
    """Of ranks."""
    shape: tuple[int, int]
    """Inputs and outputs."""


class LowRankTable:
    """What adapters add to one linear layer, each in a slot; all are empty at first.

    Args:
        weight: The layer's.
        num_slots: How many adapters there is a place for.
    """

    def __init__(self, weight: PackedWeight, num_slots: int) -> None:
        self.shape = (weight.in_features, weight.out_features)
        """Inputs and outputs."""
        self.is_gated = weight.is_gated
        self.instructions = weight.instructions
        self.pointers = torch.zeros(num_slots, _FIELDS, dtype=torch.int64)
        """LowRank of adapters.h for each slot, all zero for nothing; never moved."""
        self._kept: list[PackedLowRank | None] = [None] * num_slots

    def pack(self, down: torch.Tensor, up: torch.Tensor) -> PackedLowRank:
        """Return an adapter in the form that `put` takes; changes nothing.

        Args:
            down: [rank, in] float32, contiguous; not kept.
            up: [out, rank] float32, contiguous, with the adapter's factor; not kept. Ranks that are
                zero for a run of outputs take neither memory nor time there.

        Raises:
            ValueError: A shape, dtype, device or stride is not as above.
        """
        rank = len(down)
        inputs, outputs = self.shape
        check_tensor("pack: down", down, (rank, inputs), dtypes=_FLOAT32, packed=2)
        check_tensor("pack: up", up, (outputs, rank), dtypes=_FLOAT32, packed=2, beside=down)
        library = library_named(self.instructions)
        linear = ctypes.byref(NativeLinear(None, None, inputs, outputs, self.is_gated, False))
        sizes = (ctypes.c_int64 * 4)()
        library.octavo_low_rank_sizes(linear, rank, sizes)
        packed_down, packed_up = torch.empty(sizes[0]), torch.empty(sizes[1])
        spans = torch.empty(sizes[2], 2, dtype=torch.int64)
        used = library.octavo_pack_low_rank(
            *(linear, rank, down.data_ptr(), up.data_ptr()),
            *(packed_down.data_ptr(), packed_up.data_ptr(), spans.data_ptr()),
        )
        return PackedLowRank(packed_down, packed_up[:used].clone(), spans, sizes[3], self.shape)

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        """Give a slot what `pack` of this table returned, or None for nothing; not within a step.

        Raises:
            IndexError: There is no such slot.
            ValueError: It was packed for a layer of another shape.
        """
        if packed is not None and packed.shape != self.shape:
            raise ValueError(f"put: adapter has shape {packed.shape} but must have {self.shape}")
        self._kept[slot] = packed
        fields = [0] * self.pointers.shape[1]
        if packed is not None:
            tensors = (packed.down, packed.up, packed.spans)
            fields = [*[x.data_ptr() for x in tensors], packed.vectors]
        self.pointers[slot] = torch.tensor(fields)


def low_rank_add_reference(
    product: torch.Tensor,
    x: torch.Tensor,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Return product [tokens, out] with what `low_rank_add_` adds of the slots' down and up."""
    out = product.clone()
    for (down, up), (first, end) in zip(pairs, pairwise(starts.tolist()), strict=True):
        own = rows[first:end]
        added = linear_reference(linear_reference(x[own].float(), down), up)
        out[own] = (added + product[own]).to(product.dtype)
    return out


def low_rank_add_(
    product: torch.Tensor,
    x: torch.Tensor,
    table: LowRankTable,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Add to a layer's product what adapters add to it; mutates `product` at their rows.

    Args:
        product: [tokens, out], rows contiguous, apart from each other as they like.
        x: [tokens, in] of product's dtype, the rows that were multiplied; the same.
        table: Of the layer.
        rows: [num_rows] int64, sorted by adapter, each at most once.
        starts: [slots + 1] int64, ascending: those of a slot are rows[starts[slot]] to
            rows[starts[slot + 1]].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: A row or a slot's rows are not as above; nothing is written then.
    """
    inputs, outputs = table.shape
    check_tensor("low_rank_add_: x", x, (None, inputs), beside=table.pointers)
    check_tensor("low_rank_add_: product", product, (len(x), outputs), like=x)
    check_adapted("low_rank_add_", rows, starts, len(table.pointers))
    _low_rank_add(product, x, table.pointers, rows, starts, table.is_gated, table.instructions)


@register(
    "low_rank_add",
    "Tensor(a!) product, Tensor x, Tensor pointers, Tensor rows, Tensor starts, bool is_gated,"
    " str instructions",
)
def _low_rank_add(
    product: torch.Tensor,
    x: torch.Tensor,
    pointers: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    is_gated: bool,
    instructions: str,
) -> None:
    """Compute `low_rank_add_` of checked tensors."""
    linear = NativeLinear(None, None, x.shape[1], product.shape[1], is_gated, False)
    invalid = library_named(instructions).octavo_add_low_rank(
        element_code(x.dtype),
        *(x.data_ptr(), ctypes.byref(linear), product.data_ptr(), len(x)),
        strides_of(x.stride(0), product.stride(0)),
        *(ctypes.byref(native_adapted(rows, starts)), pointers.data_ptr()),
        torch.get_num_threads(),
    )
    if invalid != -1:
        raise adapted_error("low_rank_add_", invalid, (rows, starts), len(x))


def check_adapted(operation: str, rows: torch.Tensor, starts: torch.Tensor, num_slots: int) -> None:
    """Raise ValueError unless adapted rows have the shapes and dtypes of `low_rank_add_`."""
    cpu = torch.empty(0)
    check_tensor(f"{operation}: rows", rows, (None,), dtypes=_INT64, beside=cpu)
    check_tensor(f"{operation}: starts", starts, (num_slots + 1,), dtypes=_INT64, beside=cpu)


def native_adapted(rows: torch.Tensor, starts: torch.Tensor) -> NativeAdaptedRows:
    """Return adapted rows as native code takes them; keeps no tensor alive."""
    return NativeAdaptedRows(rows.data_ptr(), starts.data_ptr(), len(rows), len(starts) - 1)


def adapted_error(
    operation: str, invalid: int, adapted: tuple[torch.Tensor, torch.Tensor], num_tokens: int
) -> IndexError:
    """Return the error for what octavo_invalid_adapted of adapters.h has found in adapted rows."""
    rows, starts = adapted
    if invalid >= 0:
        return group_error(operation, invalid, starts, len(rows))
    row = rows[-2 - invalid].item()
    return IndexError(f"{operation}: row {row} is outside the {num_tokens} of the step")
