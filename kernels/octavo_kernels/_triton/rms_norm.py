"""Root-mean-square normalisation on a GPU; see octavo_kernels.rms_norm for the formula."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, RowsConfig, rms_norm_configs
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit
def row_offsets(row, column, inner, outer_stride, inner_stride):
    """Return where the elements of rows numbered outer * inner + i lie."""
    return ((row // inner) * outer_stride + (row % inner) * inner_stride)[:, None] + column[None, :]


@triton.jit
def _normalize(x, weight, hidden, eps):
    """Normalise float32 rows, zero past their end."""
    factor = tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)  # [ROWS]
    return x * factor[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    inner,
    hidden,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    eps,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    held = (row < rows)[:, None] & (column < hidden)[None, :]
    x = tl.load(x_ptr + row_offsets(row, column, inner, x_outer, x_inner), mask=held, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)
    out = _normalize(x.to(tl.float32), weight, hidden, eps)  # [ROWS, SIZE]
    tl.store(out_ptr + row_offsets(row, column, inner, out_outer, out_inner), out, mask=held)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    rows,
    hidden,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    eps,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, SIZE)
    held = (row < rows) & (column < hidden)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=held, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=held, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)
    # The stream is rounded to its type before it is normalised, as another layer reads it.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)  # [ROWS, SIZE]
    tl.store(residual_out_ptr + row * residual_out_stride + column, total, mask=held)
    out = _normalize(total.to(tl.float32), weight, hidden, eps)
    tl.store(out_ptr + row * out_stride + column, out, mask=held)


def launch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, config: RowsConfig
) -> None:
    """Normalise the rows of x [..., hidden] of up to three dimensions into out."""
    launch_over_rows(rms_norm_kernel, x, (weight,), eps, out, config)


def launch_over_rows(
    kernel: Any,
    x: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    eps: float,
    out: torch.Tensor,
    config: RowsConfig,
) -> None:
    """Launch a kernel that normalises rows of x [..., hidden] of up to three dimensions into out.

    It takes x, the parameters [hidden] and out, and then what `rms_norm_kernel` takes.
    """
    # Tokens without heads have one each: were `inner` their number, the kernel would be compiled
    # anew, while requests wait, for the first number of another kind (1, a multiple of 16, others).
    while x.dim() < 3:
        x, out = x.unsqueeze(-2), out.unsqueeze(-2)
    outer, inner, hidden = x.shape
    rows = outer * inner
    kernel[(triton.cdiv(rows, config.block_rows),)](
        *(x, *parameters, out),
        *(rows, inner, hidden),
        *(x.stride(0), x.stride(1), out.stride(0), out.stride(1)),
        eps,
        ROWS=config.block_rows,
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def launch_add_rms_norm(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    config: RowsConfig,
) -> None:
    """Add and normalise rows; tensors are x, residual, weight, out and residual_out."""
    x, residual, _, out, residual_out = tensors
    rows, hidden = x.shape
    add_rms_norm_kernel[(triton.cdiv(rows, config.block_rows),)](
        *tensors,
        rows,
        hidden,
        *(x.stride(0), residual.stride(0), out.stride(0), residual_out.stride(0)),
        eps,
        ROWS=config.block_rows,
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    pointer, integer = f"*{dtype}", "i32"
    for config in rms_norm_configs(capability):
        constants = {"ROWS": config.block_rows, "SIZE": config.block_size}
        # One of x, weight and out; and of x, residual, weight, out and residual_out.
        for kernel, weight, pointers, integers in (
            (rms_norm_kernel, 1, 3, 7),
            (add_rms_norm_kernel, 2, 5, 6),
        ):
            types = [pointer] * pointers + [integer] * integers + ["fp32"]
            types[weight] = "*fp32"
            yield KernelCase(kernel, dtype, types, constants, config.num_warps)
