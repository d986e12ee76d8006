"""Linear layer on a CPU, of a weight packed for its instructions: y = x @ W^T + b.

Products are summed in float32, in the order of the inputs, and rounded once: whatever the number
of rows, a row's place among them and the number of threads, its bits are the same. Knows nothing of
layers or models.
"""

import ctypes
from dataclasses import dataclass

import torch

from octavo_kernels._check import FLOAT_DTYPES, check_tensor
from octavo_kernels._native.attention import library_named
from octavo_kernels._native.library import element_code, native_instructions, strides_of
from octavo_kernels._native.processor import InstructionSet
from octavo_kernels._register import register


class NativeLinear(ctypes.Structure):
    """PackedLinear of linear.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("panels", "bias")],
        *[(name, ctypes.c_int64) for name in ("in_features", "out_features", "is_gated")],
    ]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in the layout of one instruction set, and its bias."""

    panels: torch.Tensor
    """One-dimensional, of the weight's dtype, with outputs and inputs padded by zeros."""
    bias: torch.Tensor | None
    """[out]"""
    in_features: int
    out_features: int
    is_gated: bool
    """Whether an output of the first half lies beside the one of the other half it is a gate of."""
    instructions: str
    """Name of the instruction set."""

    def native(self) -> NativeLinear:
        """Return this as native code takes it; keeps no tensor alive."""
        sizes = (self.in_features, self.out_features, self.is_gated)
        return _native_linear(self.panels, self.bias, *sizes)


def pack_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    instructions: InstructionSet | None = None,
) -> PackedWeight | None:
    """Pack a weight for `packed_linear`, or return None where native code does not serve it.

    Args:
        weight: [out, in], contiguous; not kept.
        bias: [out] of weight's dtype, or None; kept.
        is_gated: Whether the first half of the outputs is a gate of the other half, as
            `NativeLayers` wants it; changes no result of `packed_linear`.
        instructions: Those to pack for; None for the ones that native code serves with here.

    Raises:
        ValueError: A shape, device or stride is not as above.
    """
    if weight.device.type != "cpu" or weight.dtype not in FLOAT_DTYPES:
        return None
    chosen = instructions or native_instructions()
    if chosen is None:
        return None
    check_tensor("pack_weight: weight", weight, (None, None), packed=2)
    out_features, in_features = weight.shape
    if is_gated and out_features % 2:
        raise ValueError(
            f"pack_weight: weight has {out_features} outputs but a gated one must have an even "
            "number"
        )
    if bias is not None:
        check_tensor("pack_weight: bias", bias, (out_features,), like=weight)
    library, element = library_named(chosen.name), element_code(weight.dtype)
    size = library.octavo_packed_size(element, in_features, out_features)
    panels = torch.empty(size // weight.element_size(), dtype=weight.dtype)
    packed = PackedWeight(panels, bias, in_features, out_features, is_gated, chosen.name)
    library.octavo_pack_weight(
        element, weight.data_ptr(), ctypes.byref(packed.native()), torch.get_num_threads()
    )
    return packed


def packed_linear(
    x: torch.Tensor, weight: PackedWeight, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows by a packed weight and add its bias.

    Args:
        x: [rows, in] of the weight's dtype, rows contiguous, apart from each other as they like.
        weight: What `pack_weight` returned.
        out: Receives the result, [rows, out] of x's dtype, apart from x; or float32, and then the
            same numbers.

    Returns:
        `out`, or a new tensor [rows, out].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_tensor("packed_linear: x", x, (None, weight.in_features), like=weight.panels)
    shape = (x.shape[0], weight.out_features)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype)
    else:
        dtypes = (x.dtype, torch.float32)
        check_tensor("packed_linear: out", out, shape, dtypes=dtypes, beside=x)
    _packed_linear(x, weight.panels, weight.bias, out, weight.is_gated, weight.instructions)
    return out


@register(
    "packed_linear",
    "Tensor x, Tensor panels, Tensor? bias, Tensor(a!) out, bool is_gated, str instructions",
)
def _packed_linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    is_gated: bool,
    instructions: str,
) -> None:
    """Compute `packed_linear` of checked tensors into `out`."""
    library = library_named(instructions)
    multiply = library.octavo_linear
    if out.dtype != x.dtype:
        multiply = library.octavo_linear_to_float32
    multiply(
        element_code(x.dtype),
        x.data_ptr(),
        ctypes.byref(_native_linear(panels, bias, x.shape[1], out.shape[1], is_gated)),
        *(out.data_ptr(), len(x)),
        strides_of(x.stride(0), out.stride(0)),
        None,
        torch.get_num_threads(),
    )


def _native_linear(
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
    is_gated: bool,
) -> NativeLinear:
    bias_pointer = None if bias is None else bias.data_ptr()
    return NativeLinear(panels.data_ptr(), bias_pointer, in_features, out_features, is_gated)
