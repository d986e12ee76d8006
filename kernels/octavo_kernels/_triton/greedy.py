"""Greedy choice on a GPU; see octavo_kernels.greedy."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig
from octavo_kernels._sampling_launch import choose_row_scan
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels._triton.rows import find_best


@triton.jit
def greedy_kernel(logits, out, vocab, stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, _, first, finite = find_best(logits + row * stride, vocab, SIZE)
    tl.store(out + row, tl.where(finite, first, -1).to(tl.int64))


def launch_greedy(logits: torch.Tensor, out: torch.Tensor, config: PiecesConfig) -> None:
    """Choose the best token of each row of logits [rows, vocab]."""
    rows, vocab = logits.shape
    if rows:
        greedy_kernel[(rows,)](
            logits, out, vocab, logits.stride(0), SIZE=config.block_size, num_warps=config.num_warps
        )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    if dtype == "fp32":
        config = choose_row_scan(capability)
        types = ["*fp32", "*i64", "i32", "i32"]
        yield KernelCase(greedy_kernel, dtype, types, {"SIZE": config.block_size}, config.num_warps)
