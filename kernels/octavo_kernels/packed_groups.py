"""Grouped products on a CPU, of weights packed for its instructions; see `grouped_linear`.

A row has the bits that `packed_linear` gives it with its group's weight. Weights are packed one by
one into memory that is there for all of them, and may be replaced. Knows nothing of experts or
adapters.
"""

import ctypes
from dataclasses import dataclass

import torch

from octavo_kernels._check import FLOAT_DTYPES, check_tensor
from octavo_kernels._native.attention import library_named
from octavo_kernels._native.library import element_code, native_instructions, strides_of
from octavo_kernels._native.processor import InstructionSet
from octavo_kernels._register import register
from octavo_kernels.grouped_linear import group_error
from octavo_kernels.packed_linear import NativeLinear, empty_panels


@dataclass(frozen=True)
class PackedGroups:
    """Weights [groups, out, in] in the layout of one instruction set."""

    panels: torch.Tensor
    """[groups, size], each weight's as PackedWeight has them."""
    dtype: torch.dtype
    """The weights', and that of the rows they multiply."""
    in_features: int
    out_features: int
    is_gated: bool
    """Whether an output of the first half lies beside the one of the other half it is a gate of."""
    instructions: str
    """Name of the instruction set."""


def make_packed_groups(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
    to_int8: bool = False,
    instructions: InstructionSet | None = None,
) -> PackedGroups | None:
    """Return room for the weights of groups, or None where native code does not serve.

    What a weight is that has not been packed yet is not defined.

    Args:
        shape: Groups, outputs and inputs.
        dtype: Of the weights.
        is_gated: Whether the first half of the outputs is a gate of the other half, as
            `packed_grouped_silu` wants it; changes no result of `packed_grouped_linear`.
        to_int8: Whether to quantise weights to 8-bit integers, as `pack_weight` does.
        instructions: Those to pack for; None for the ones that native code serves with here.

    Raises:
        ValueError: A gated weight would have an odd number of outputs.
    """
    groups, out_features, in_features = shape
    chosen = instructions or native_instructions()
    if dtype not in FLOAT_DTYPES or chosen is None:
        return None
    if is_gated and out_features % 2:
        raise ValueError(
            f"make_packed_groups: weights have {out_features} outputs but gated ones must have an "
            "even number"
        )
    sizes = (in_features, out_features)
    one = empty_panels(library_named(chosen.name), sizes, dtype, to_int8)
    panels = one.new_empty(groups, len(one))
    return PackedGroups(panels, dtype, in_features, out_features, is_gated, chosen.name)


def pack_group(groups: PackedGroups, index: int, weight: torch.Tensor) -> None:
    """Pack one group's weight in the place of what it had; mutates `groups.panels`.

    Args:
        groups: What `make_packed_groups` returned.
        index: The group.
        weight: [out, in] of the groups' dtype, contiguous; not kept.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: There is no such group.
    """
    panels = groups.panels[index]
    shape = (groups.out_features, groups.in_features)
    check_tensor(
        *("pack_group: weight", weight, shape), dtypes=(groups.dtype,), beside=panels, packed=2
    )
    library = library_named(groups.instructions)
    is_int8 = panels.dtype == torch.uint8
    pack = library.octavo_pack_int8_weight if is_int8 else library.octavo_pack_weight
    native = _native_linear(panels, shape[1], shape[0], groups.is_gated)
    pack(
        element_code(weight.dtype),
        weight.data_ptr(),
        ctypes.byref(native),
        torch.get_num_threads(),
    )


def packed_grouped_linear(
    x: torch.Tensor,
    weights: PackedGroups,
    starts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows by its packed weight.

    Args:
        x: [rows, in] of the weights' dtype, rows contiguous, apart from each other as they like.
        weights: What `make_packed_groups` returned.
        starts: [groups + 1] int64: group g has the rows from starts[g] to starts[g + 1]. Ascending,
            in [0, rows].
        out: Receives the result, [rows, out] of x's dtype, apart from x. Rows of no group, before
            the first and after the last, stay as they are.

    Returns:
        `out`, or a new tensor [rows, out], whose rows of no group are not written.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: A group's rows are not as above; nothing is written then.
    """
    out = _check("packed_grouped_linear", x, weights, starts, out, weights.out_features)
    _multiply(x, weights, starts, out, False)
    return out


def packed_grouped_silu(
    x: torch.Tensor,
    weights: PackedGroups,
    starts: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same with gated weights, and what `silu_and_mul` does with the result.

    Args:
        x: As `packed_grouped_linear` takes it.
        weights: Made with `is_gated`.
        starts: As `packed_grouped_linear` takes it.
        out: As there, but [rows, out / 2].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or the weights are not gated.
        IndexError: As `packed_grouped_linear`.
    """
    if not weights.is_gated:
        raise ValueError("packed_grouped_silu: weights must be packed as gated")
    out = _check("packed_grouped_silu", x, weights, starts, out, weights.out_features // 2)
    _multiply(x, weights, starts, out, True)
    return out


def _check(
    operation: str,
    x: torch.Tensor,
    weights: PackedGroups,
    starts: torch.Tensor,
    out: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """Return `out`, or a new tensor, once the arguments are as they must be."""
    dtypes, panels = (weights.dtype,), weights.panels
    shape, starts_shape = (x.shape[0], width), (len(panels) + 1,)
    check_tensor(*(f"{operation}: x", x, (None, weights.in_features)), dtypes=dtypes, beside=panels)
    check_tensor(
        *(f"{operation}: starts", starts, starts_shape), dtypes=(torch.int64,), beside=panels
    )
    if out is None:
        return torch.empty(shape, dtype=x.dtype)
    check_tensor(f"{operation}: out", out, shape, like=x)
    return out


def _multiply(
    x: torch.Tensor,
    weights: PackedGroups,
    starts: torch.Tensor,
    out: torch.Tensor,
    with_silu: bool,
) -> None:
    _packed_grouped_linear(
        *(x, weights.panels, starts, out),
        *(weights.is_gated, with_silu, weights.instructions),
    )


@register(
    "packed_grouped_linear",
    "Tensor x, Tensor panels, Tensor starts, Tensor(a!) out, bool is_gated, bool with_silu,"
    " str instructions",
)
def _packed_grouped_linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    is_gated: bool,
    with_silu: bool,
    instructions: str,
) -> None:
    """Compute `packed_grouped_linear`, or `packed_grouped_silu`, of checked tensors into `out`."""
    library = library_named(instructions)
    multiply = library.octavo_grouped_silu_linear if with_silu else library.octavo_grouped_linear
    first = _native_linear(panels, x.shape[1], out.shape[1] * (2 if with_silu else 1), is_gated)
    invalid = multiply(
        element_code(x.dtype),
        *(x.data_ptr(), ctypes.byref(first)),
        *(starts.data_ptr(), len(panels)),
        *(out.data_ptr(), len(x)),
        strides_of(x.stride(0), out.stride(0)),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise group_error("packed_grouped_linear", invalid, starts, len(x))


def _native_linear(
    panels: torch.Tensor, in_features: int, out_features: int, is_gated: bool
) -> NativeLinear:
    is_int8 = panels.dtype == torch.uint8
    return NativeLinear(panels.data_ptr(), None, in_features, out_features, is_gated, is_int8)
