"""Linear layer on a CPU, of a weight packed for its instructions: y = x @ W^T + b.

Products are summed in float32, in the order of the inputs, and rounded once: whatever the number
of rows, a row's place among them and the number of threads, its bits are the same. A weight may be
packed as 8-bit integers: the result is then that of `int8_linear_reference`. Knows nothing of
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
        *[
            (name, ctypes.c_int64)
            for name in ("in_features", "out_features", "is_gated", "is_int8")
        ],
    ]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in the layout of one instruction set, and its bias."""

    panels: torch.Tensor
    """One-dimensional, of the weight's dtype, with outputs and inputs padded by zeros; or uint8, of
    8-bit integers and the scales of all outputs."""
    bias: torch.Tensor | None
    """[out]"""
    dtype: torch.dtype
    """The weight's, and that of the rows it multiplies."""
    in_features: int
    out_features: int
    is_gated: bool
    """Whether an output of the first half lies beside the one of the other half it is a gate of."""
    instructions: str
    """Name of the instruction set."""

    @property
    def is_int8(self) -> bool:
        """Whether it is packed as 8-bit integers."""
        return self.panels.dtype == torch.uint8

    def native(self) -> NativeLinear:
        """Return this as native code takes it; keeps no tensor alive."""
        sizes = (self.in_features, self.out_features, self.is_gated)
        return _native_linear(self.panels, self.bias, *sizes)


def packs_weights(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `pack_weight` packs weights of a dtype on a device."""
    served = device.type == "cpu" and dtype in FLOAT_DTYPES
    return served and native_instructions() is not None


def pack_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    to_int8: bool = False,
    instructions: InstructionSet | None = None,
) -> PackedWeight | None:
    """Pack a weight for `packed_linear`, or return None where native code does not serve it.

    Args:
        weight: [out, in], contiguous; not kept.
        bias: [out] of weight's dtype, or None; kept.
        is_gated: Whether the first half of the outputs is a gate of the other half, as
            `NativeLayers` wants it; changes no result of `packed_linear`.
        to_int8: Whether to quantise it to 8-bit integers.
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
    library = library_named(chosen.name)
    pack = library.octavo_pack_int8_weight if to_int8 else library.octavo_pack_weight
    panels = empty_panels(library, (in_features, out_features), weight.dtype, to_int8)
    packed = PackedWeight(
        panels, bias, weight.dtype, in_features, out_features, is_gated, chosen.name
    )
    native = ctypes.byref(packed.native())
    pack(element_code(weight.dtype), weight.data_ptr(), native, torch.get_num_threads())
    return packed


def empty_panels(
    library: ctypes.CDLL, sizes: tuple[int, int], dtype: torch.dtype, to_int8: bool
) -> torch.Tensor:
    """Return memory for a packed weight of `sizes`, inputs and outputs, as PackedWeight has it."""
    if to_int8:
        return torch.empty(library.octavo_packed_int8_size(*sizes), dtype=torch.uint8)
    size = library.octavo_packed_size(element_code(dtype), *sizes)
    return torch.empty(size // dtype.itemsize, dtype=dtype)


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
    check_tensor(
        "packed_linear: x",
        x,
        (None, weight.in_features),
        dtypes=(weight.dtype,),
        beside=weight.panels,
    )
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
        *(None, None),
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
    is_int8 = panels.dtype == torch.uint8
    return NativeLinear(
        panels.data_ptr(), bias_pointer, in_features, out_features, is_gated, is_int8
    )
