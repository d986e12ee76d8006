"""Layer normalisation on a GPU; see octavo_kernels.layer_norm for the formula."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, RowsConfig, rms_norm_configs
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels._triton.rms_norm import launch_over_rows, row_offsets


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
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
    x = x.to(tl.float32)  # [ROWS, SIZE]
    mean = tl.sum(x, 1) / hidden  # [ROWS]
    centred = tl.where(held, x - mean[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / hidden + eps)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < hidden, other=0.0)
    out = centred * factor[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + row_offsets(row, column, inner, out_outer, out_inner), out, mask=held)


def launch_layer_norm(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    config: RowsConfig,
) -> None:
    """Normalise rows of up to three dimensions; tensors are x [..., hidden], weight, bias, out."""
    x, weight, bias, out = tensors
    launch_over_rows(layer_norm_kernel, x, (weight, bias), eps, out, config)


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    types = [f"*{dtype}", "*fp32", "*fp32", f"*{dtype}", *["i32"] * 7, "fp32"]
    for config in rms_norm_configs(capability):
        constants = {"ROWS": config.block_rows, "SIZE": config.block_size}
        yield KernelCase(layer_norm_kernel, dtype, types, constants, config.num_warps)
