"""Log-probabilities of tokens on a GPU; see octavo_kernels.token_logprobs for the formula."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig
from octavo_kernels._sampling_launch import choose_row_scan
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels._triton.rows import find_best


@triton.jit(do_not_specialize=["num_rows"])
def token_logprobs_kernel(
    logits,  # [num_rows, vocab]
    rows,  # [n] int64
    token_ids,  # [n] int64
    out,  # [n] float32
    num_rows,
    vocab,
    stride,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0)
    number, token_id = tl.load(rows + i), tl.load(token_ids + i)
    exists = (number >= 0) & (number < num_rows) & (token_id >= 0) & (token_id < vocab)
    row = logits + tl.where(exists, number, 0) * stride
    # Nothing is read of a row that does not exist.
    size = tl.where(exists, vocab, 0)
    _, best, _, finite = find_best(row, size, SIZE)
    best = tl.where(finite, best, 0.0)
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, size, SIZE):
        id = start + tl.arange(0, SIZE)
        x = tl.load(row + id, mask=id < size, other=float("-inf"))
        total += tl.exp(x - best)
    chosen = tl.load(row + token_id, mask=exists, other=0.0)
    logprob = chosen - best - tl.log(tl.where(finite, tl.sum(total, 0), 1.0))
    tl.store(out + i, tl.where(finite, logprob, float("nan")))


def launch_token_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    out: torch.Tensor,
    config: PiecesConfig,
) -> None:
    """Write the log-probabilities of token_ids [n] in rows [n] of logits [rows, vocab]."""
    if len(rows):
        token_logprobs_kernel[(len(rows),)](
            *(logits, rows, token_ids, out),
            *logits.shape,
            logits.stride(0),
            SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    if dtype == "fp32":
        config = choose_row_scan(capability)
        types = ["*fp32", "*i64", "*i64", "*fp32", "i32", "i32", "i32"]
        constants = {"SIZE": config.block_size}
        yield KernelCase(token_logprobs_kernel, dtype, types, constants, config.num_warps)
