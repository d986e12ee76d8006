"""Gather and scatter of whole blocks on a GPU; see octavo_kernels.gather_blocks."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig, choose_block_moves
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit
def _find_piece(block_ids, num_blocks, size, SIZE: tl.constexpr):
    """Return this program's block, whether it exists, and where its piece begins and ends."""
    block = tl.load(block_ids + tl.program_id(0))
    offset = tl.program_id(1).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    return block, (block >= 0) & (block < num_blocks), offset, offset < size


@triton.jit(do_not_specialize=["num_blocks"])
def gather_blocks_kernel(
    storage,  # [num_blocks, size]
    block_ids,  # [count] int64
    out,  # [count, size]
    num_blocks,
    size,
    SIZE: tl.constexpr,
):
    block, exists, offset, inside = _find_piece(block_ids, num_blocks, size, SIZE)
    piece = tl.load(storage + block * size + offset, mask=inside & exists, other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * size + offset, piece, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def scatter_blocks_kernel(
    blocks,  # [count, size]
    block_ids,  # [count] int64
    storage,  # [num_blocks, size]
    num_blocks,
    size,
    SIZE: tl.constexpr,
):
    block, exists, offset, inside = _find_piece(block_ids, num_blocks, size, SIZE)
    at = tl.program_id(0).to(tl.int64) * size + offset
    piece = tl.load(blocks + at, mask=inside, other=0.0)
    tl.store(storage + block * size + offset, piece, mask=inside & exists)


def launch_gather_blocks(
    storage: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, config: PiecesConfig
) -> None:
    """Copy blocks of checked storage [num_blocks, ...] into out [count, ...]."""
    _launch(gather_blocks_kernel, (storage, block_ids, out), len(storage), out, config)


def launch_scatter_blocks(
    blocks: torch.Tensor, block_ids: torch.Tensor, storage: torch.Tensor, config: PiecesConfig
) -> None:
    """Copy checked blocks [count, ...] into storage [num_blocks, ...]."""
    _launch(scatter_blocks_kernel, (blocks, block_ids, storage), len(storage), blocks, config)


def _launch(kernel, tensors, num_blocks: int, moved: torch.Tensor, config: PiecesConfig) -> None:
    if moved.numel() == 0:
        return
    size = moved[0].numel()
    kernel[(len(moved), triton.cdiv(size, config.block_size))](
        *tensors,
        num_blocks,
        size,
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    config = choose_block_moves(capability)
    types = [f"*{dtype}", "*i64", f"*{dtype}", "i32", "i32"]
    for kernel in (gather_blocks_kernel, scatter_blocks_kernel):
        yield KernelCase(kernel, dtype, types, {"SIZE": config.block_size}, config.num_warps)
