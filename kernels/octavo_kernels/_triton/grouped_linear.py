"""Grouped products on a GPU: each group's rows with a weight of its own.

A program computes a block of rows of one group times a block of columns, in one chain of matrix
products in order of the inputs: as in `linear`, where the reasons stand, neither how many rows
share a program nor what they hold changes a bit. How many rows a group has is not known to the
host, which therefore launches as many programs as there can be blocks; each finds its group from
where groups begin, and those past the last block end at once. Compiled for its targets and checked
in the interpreter; nothing was measured on a GPU.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture
from octavo_kernels._linear_launch import LinearConfig, choose_tile
from octavo_kernels._triton.ahead_of_time import KernelCase, case_dtype
from octavo_kernels._triton.linear import finish, weight_cases

_GROUPS_AT_ONCE = 128  # whose blocks a program counts in one step


@triton.jit(do_not_specialize=["rows", "groups"])
def grouped_linear_kernel(
    out,  # [rows, out_features]
    x,  # [rows, in_features]
    weight,  # [groups, out_features, in_features], of x's type or of 8 bits
    scales,  # [groups, out_features] float32, if HAS_SCALES
    starts,  # [groups + 1] int64
    rows,
    groups,
    in_features,
    out_features,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    # The group in whose blocks this one is, counted from the first block of the first group.
    block = tl.program_id(0)
    nothing = tl.full([], 0, tl.int64)
    group, first, end = nothing, nothing, nothing
    before = 0  # blocks of the groups that were looked at
    for base in range(0, groups, GROUPS):
        index = base + tl.arange(0, GROUPS)
        begins = tl.load(starts + index, mask=index < groups, other=0)
        ends = tl.load(starts + index + 1, mask=index < groups, other=0)
        blocks = ((ends - begins + ROWS - 1) // ROWS).to(tl.int32)
        upto = before + tl.cumsum(blocks, 0)
        is_own = (block < upto) & (block >= upto - blocks)
        group += tl.sum(tl.where(is_own, index, 0), 0)
        first += tl.sum(tl.where(is_own, begins + (block - upto + blocks) * ROWS, 0), 0)
        end += tl.sum(tl.where(is_own, ends, 0), 0)
        before += tl.sum(blocks, 0)
    if block >= before:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = ((row >= 0) & (row < tl.minimum(end, rows)))[:, None]
    is_column = (column < out_features)[None, :]
    x_rows = x + row[:, None] * x_stride + depth[None, :]  # [ROWS, DEPTH]
    own_weight = weight + group * out_features * in_features
    columns = own_weight + column[None, :] * in_features + depth[:, None]  # [DEPTH, COLUMNS]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, in_features, DEPTH):
        is_input = k + depth < in_features
        inputs = tl.load(x_rows + k, mask=is_row & is_input[None, :], other=0.0)
        factors = tl.load(columns + k, mask=is_column & is_input[:, None], other=0.0)
        total = tl.dot(inputs, factors.to(x.dtype.element_ty), total, input_precision="ieee")
    own_scales = scales + group * out_features
    total = finish(total, scales, own_scales, column, out_features, False, HAS_SCALES)
    tl.store(
        out + row[:, None] * out_stride + column[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row & is_column,
    )


def launch_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    config: LinearConfig,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute `grouped_linear` of checked tensors into `out`."""
    rows, groups, out_features = len(x), len(weight), weight.shape[1]
    if rows == 0 or groups == 0 or out_features == 0:
        return
    tile = choose_tile(config, triton.cdiv(rows, groups))
    # Every group may end in a block that is not full.
    blocks = rows // tile.rows + min(groups, rows)
    grouped_linear_kernel[(blocks, triton.cdiv(out_features, config.columns))](
        *(out, x, weight, weight if scales is None else scales, starts),
        *(rows, groups, x.shape[1], out_features, x.stride(0), out.stride(0)),
        ROWS=tile.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUPS=_GROUPS_AT_ONCE,
        HAS_SCALES=scales is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    tensor = f"*{dtype}"
    for weight, config, tile in weight_cases(capability, dtype):
        has_scales = weight != dtype
        constants = {"ROWS": tile.rows, "COLUMNS": config.columns, "DEPTH": config.depth}
        constants |= {"GROUPS": _GROUPS_AT_ONCE, "HAS_SCALES": int(has_scales)}
        types = [tensor, tensor, f"*{weight}", "*fp32" if has_scales else tensor, "*i64"]
        yield KernelCase(
            *(grouped_linear_kernel, case_dtype(dtype, weight), [*types, *["i32"] * 6]),
            *(constants, tile.num_warps, tile.num_stages),
        )
