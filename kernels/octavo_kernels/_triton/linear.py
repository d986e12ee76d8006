"""Products with a weight on a GPU, whose bits for a row do not depend on the other rows.

A program computes a block of rows times a block of columns. It sums over the inputs piece by piece,
pieces of a fixed size counted from 0, each from zero in float32 by matrix products in order of the
inputs, and the pieces are added in order: in registers where one program takes all pieces, else
through memory, where `add_pieces_kernel` does the same additions. Where there is one piece, it is
the sum. How many rows there are decides which of these it is, and how many rows share a program;
neither changes a bit:

- all tiles of a configuration lead to one matrix instruction, which for each element of its result
  adds the same few products to the same sum, whatever the other elements are (the tests compile
  every tile and compare the instructions);
- each element is one chain of these instructions, in order of the inputs, begun anew at the places
  where pieces begin;
- rows and inputs that do not exist are zeros: they reach no other row, and add zeros at the end.

The first of these is how the hardware is built, not what its makers promise. Compiled for its
targets and checked in the interpreter; nothing was measured on a GPU.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture
from octavo_kernels._linear_launch import (
    LinearConfig,
    RowTile,
    adds_in_registers,
    choose_linear,
    choose_piece,
    choose_tile,
    weight_types,
)
from octavo_kernels._triton.ahead_of_time import KernelCase, case_dtype

_GROUP = 8  # row blocks that read a block of the weight before it leaves the cache
_ADDED_COLUMNS = 512
_ADDING_WARPS = 4


@triton.jit
def finish(
    total,  # [ROWS, COLUMNS] float32
    bias,  # [out_features], if HAS_BIAS
    scales,  # [out_features] float32, if HAS_SCALES
    column,  # [COLUMNS]
    out_features,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    # A scale and a bias are one operation, so that no compiler makes two of it in one kernel and
    # one in the other.
    is_column = column < out_features
    if HAS_SCALES:
        factor = tl.load(scales + column, mask=is_column, other=0.0)[None, :]
        if HAS_BIAS:
            addend = tl.load(bias + column, mask=is_column, other=0.0)[None, :].to(tl.float32)
            total = tl.fma(total, factor, addend)
        else:
            total *= factor
    elif HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    out,  # [rows, out_features], or of each piece [pieces, rows, out_features] float32
    x,  # [rows, in_features]
    weight,  # [out_features, in_features], of x's type or of 8 bits
    bias,  # [out_features], if HAS_BIAS
    scales,  # [out_features] float32, if HAS_SCALES
    rows,
    in_features,
    out_features,
    x_stride,
    out_stride,
    piece,  # inputs of a piece, a multiple of DEPTH
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ADDS_PIECES: tl.constexpr,
):
    # Neighbouring programs read the same block of the weight, for GROUP blocks of rows.
    in_group = GROUP * tl.cdiv(out_features, COLUMNS)
    first_block = tl.program_id(0) // in_group * GROUP
    group = tl.minimum(tl.cdiv(rows, ROWS) - first_block, GROUP)
    index = tl.program_id(0) % in_group
    row = (first_block + index % group).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (index // group).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = (row < rows)[:, None]
    is_column = (column < out_features)[None, :]
    x_rows = x + row[:, None] * x_stride + depth[None, :]  # [ROWS, DEPTH]
    columns = weight + column[None, :] * in_features + depth[:, None]  # [DEPTH, COLUMNS]

    first = tl.program_id(1) * piece
    end = in_features
    if not ADDS_PIECES:
        end = tl.minimum(first + piece, in_features)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(first, end, DEPTH):
        is_input = k + depth < in_features
        inputs = tl.load(x_rows + k, mask=is_row & is_input[None, :], other=0.0)
        factors = tl.load(columns + k, mask=is_column & is_input[:, None], other=0.0)
        part = tl.dot(inputs, factors.to(x.dtype.element_ty), part, input_precision="ieee")
        # One loop over all pieces, for loads run ahead of a loop's end but not past it.
        if ADDS_PIECES and (k + DEPTH) % piece == 0:
            total += part
            part = tl.zeros([ROWS, COLUMNS], tl.float32)
    if ADDS_PIECES:
        part += total
    part = finish(part, bias, scales, column, out_features, HAS_BIAS, HAS_SCALES)
    out += tl.program_id(1).to(tl.int64) * rows * out_stride
    tl.store(
        out + row[:, None] * out_stride + column[None, :],
        part.to(out.dtype.element_ty),
        mask=is_row & is_column,
    )


@triton.jit(do_not_specialize=["pieces"])
def add_pieces_kernel(
    out,  # [rows, out_features]
    parts,  # [pieces, rows, out_features] float32
    bias,  # [out_features], if HAS_BIAS
    scales,  # [out_features] float32, if HAS_SCALES
    pieces,
    out_features,
    out_stride,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < out_features
    total = tl.zeros([1, COLUMNS], tl.float32)
    for piece in range(0, pieces):
        at = (piece * rows + row) * out_features + column
        total += tl.load(parts + at, mask=is_column, other=0.0)[None, :]
    total = finish(total, bias, scales, column, out_features, HAS_BIAS, HAS_SCALES)
    at = out + row * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_column[None, :])


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: LinearConfig,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute checked x [rows, in] @ weight [out, in]^T * scales + bias into out [rows, out]."""
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if rows == 0 or out_features == 0:
        return
    tile = choose_tile(config, rows)
    piece = choose_piece(config, in_features, out_features)
    pieces = max(1, triton.cdiv(in_features, piece))
    in_registers = pieces > 1 and adds_in_registers(config, rows, out_features)
    through_memory = pieces > 1 and not in_registers
    result = out
    if through_memory:
        result = torch.empty((pieces, rows, out_features), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(rows, tile.rows) * triton.cdiv(out_features, config.columns)
    has_bias, has_scales = bias is not None, scales is not None
    bias = weight if bias is None else bias
    scales = weight if scales is None else scales
    linear_kernel[(blocks, pieces if through_memory else 1)](
        *(result, x, weight, bias, scales),
        *(rows, in_features, out_features, x.stride(0), result.stride(-2), piece),
        ROWS=tile.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=_GROUP,
        HAS_BIAS=has_bias and not through_memory,
        HAS_SCALES=has_scales and not through_memory,
        ADDS_PIECES=in_registers,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if through_memory:
        add_pieces_kernel[(rows, triton.cdiv(out_features, _ADDED_COLUMNS))](
            *(out, result, bias, scales, pieces, out_features, out.stride(0)),
            COLUMNS=_ADDED_COLUMNS,
            HAS_BIAS=has_bias,
            HAS_SCALES=has_scales,
            num_warps=_ADDING_WARPS,
        )


def weight_cases(
    capability: Architecture, dtype: str
) -> Iterator[tuple[str, LinearConfig, RowTile]]:
    """Yield the types of weights for rows of this one, each with the ways of being launched."""
    for weight in (dtype, *weight_types(capability)):
        size = 4 if dtype == "fp32" else 2
        config = choose_linear(size, capability, of_8_bits=weight != dtype)
        for tile in config.tiles:
            yield weight, config, tile


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    tensor, parts = f"*{dtype}", "*fp32"
    for weight, config, tile in weight_cases(capability, dtype):
        has_scales = int(weight != dtype)
        sizes = {"ROWS": tile.rows, "COLUMNS": config.columns, "DEPTH": config.depth}
        # The sum of one piece, of all pieces, and one piece of many.
        for result, is_whole, adds_pieces in ((tensor, 1, 0), (tensor, 1, 1), (parts, 0, 0)):
            constants = {"GROUP": _GROUP, "HAS_BIAS": is_whole}
            constants |= {"HAS_SCALES": is_whole * has_scales, "ADDS_PIECES": adds_pieces}
            types = [result, tensor, f"*{weight}", tensor, parts if has_scales else tensor]
            yield KernelCase(
                *(linear_kernel, case_dtype(dtype, weight), [*types, *["i32"] * 6]),
                *(sizes | constants, tile.num_warps, tile.num_stages),
            )
    for has_scales, scales in enumerate((tensor, parts)):
        constants = {"COLUMNS": _ADDED_COLUMNS, "HAS_BIAS": 1, "HAS_SCALES": has_scales}
        yield KernelCase(
            *(add_pieces_kernel, dtype, [tensor, parts, tensor, scales, *["i32"] * 3]),
            *(constants, _ADDING_WARPS),
        )
