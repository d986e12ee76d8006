"""Masks of tokens on a GPU; see octavo_kernels.apply_token_bitmask for their layout."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig
from octavo_kernels._sampling_launch import choose_bitmask
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit(do_not_specialize=["num_rows"])
def apply_token_bitmask_kernel(
    logits,  # [num_rows, vocab], changed
    bitmask,  # [n, num_words] int32
    rows,  # [n] int64
    num_words,
    num_rows,
    vocab,
    stride,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    if (row < 0) | (row >= num_rows):
        return
    id = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    word = tl.load(bitmask + i * num_words + id // 32, mask=id // 32 < num_words, other=0)
    cleared = ((word >> (id % 32)) & 1) == 0
    tl.store(logits + row * stride + id, float("-inf"), mask=cleared & (id < vocab))


def launch_apply_token_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor, config: PiecesConfig
) -> None:
    """Mask rows of logits [rows, vocab] in place."""
    pieces = triton.cdiv(logits.shape[1], config.block_size)
    if len(rows):
        apply_token_bitmask_kernel[(len(rows), pieces)](
            *(logits, bitmask, rows),
            bitmask.shape[1],
            *logits.shape,
            logits.stride(0),
            SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    if dtype == "fp32":
        config = choose_bitmask(capability)
        types = ["*fp32", "*i32", "*i64", *["i32"] * 4]
        constants = {"SIZE": config.block_size}
        yield KernelCase(apply_token_bitmask_kernel, dtype, types, constants, config.num_warps)
