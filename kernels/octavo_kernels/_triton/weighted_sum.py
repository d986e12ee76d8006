"""Weighted sums of rows on a GPU; see octavo_kernels.weighted_sum."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig, choose_gated
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit(do_not_specialize=["count"])
def weighted_sum_kernel(
    rows,  # [count, size]
    places,  # [tokens, chosen] int64
    weights,  # [tokens, chosen] float32
    out,  # [tokens, size]
    count,
    chosen,
    size,
    stride,
    out_stride,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_column = column < size
    total = tl.zeros([SIZE], tl.float32)
    for index in range(0, chosen):
        place = tl.load(places + token * chosen + index)
        is_row = (place >= 0) & (place < count)
        row = tl.load(rows + place * stride + column, mask=is_column & is_row, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + token * chosen + index)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=is_column)


def launch_weighted_sum(
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    config: PiecesConfig,
) -> None:
    """Compute `weighted_sum` of checked tensors into `out`."""
    tokens, size = out.shape
    if tokens == 0 or size == 0:
        return
    weighted_sum_kernel[(tokens, triton.cdiv(size, config.block_size))](
        *(rows, places, weights, out),
        *(len(rows), places.shape[1], size, rows.stride(0), out.stride(0)),
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    config = choose_gated(capability)
    types = [f"*{dtype}", "*i64", "*fp32", f"*{dtype}", *["i32"] * 5]
    yield KernelCase(
        weighted_sum_kernel, dtype, types, {"SIZE": config.block_size}, config.num_warps
    )
