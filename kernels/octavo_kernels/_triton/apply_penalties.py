"""Penalties on a GPU; see octavo_kernels.apply_penalties for the formula."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig
from octavo_kernels._logits import Penalties
from octavo_kernels._sampling_launch import choose_penalties
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def apply_penalties_kernel(
    logits,  # [num_rows, vocab], changed
    rows,  # [n] int64
    row_starts,  # [n + 1] int64
    token_ids,  # [num_tokens] int64
    output_counts,  # [num_tokens] int32
    repetition,  # [n] float32
    presence,  # [n] float32
    frequency,  # [n] float32
    num_tokens,
    num_rows,
    vocab,
    stride,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if (row < 0) | (row >= num_rows):
        return
    begin = tl.maximum(tl.load(row_starts + i), 0)
    end = tl.minimum(tl.load(row_starts + i + 1), num_tokens)
    factor, once, each = tl.load(repetition + i), tl.load(presence + i), tl.load(frequency + i)
    for start in range(begin, end, SIZE):
        token = start + tl.arange(0, SIZE)
        id = tl.load(token_ids + token, mask=token < end, other=-1)
        count = tl.load(output_counts + token, mask=token < end, other=0)
        place = logits + row * stride + id
        known = (id >= 0) & (id < vocab)
        x = tl.load(place, mask=known, other=0.0)
        x = tl.where(x < 0, x * factor, x / factor) - each * count.to(tl.float32)
        tl.store(place, tl.where(count > 0, x - once, x), mask=known)


def launch_apply_penalties(
    logits: torch.Tensor, penalties: Penalties, config: PiecesConfig
) -> None:
    """Penalise logits [rows, vocab] in place."""
    if len(penalties.rows):
        apply_penalties_kernel[(len(penalties.rows),)](
            logits,
            penalties.rows,
            penalties.row_starts,
            penalties.token_ids,
            penalties.output_counts,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
            len(penalties.token_ids),
            *logits.shape,
            logits.stride(0),
            SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    if dtype == "fp32":
        config = choose_penalties(capability)
        types = ["*fp32", *["*i64"] * 3, "*i32", *["*fp32"] * 3, *["i32"] * 4]
        constants = {"SIZE": config.block_size}
        yield KernelCase(apply_penalties_kernel, dtype, types, constants, config.num_warps)
