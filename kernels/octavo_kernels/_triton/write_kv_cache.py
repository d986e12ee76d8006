"""Write of keys and values into a paged cache on a GPU.

Knows the cache of TritonAttention alone. Not measured on a GPU.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit
def keep_finite(value):
    """Return values [..., elements] with 0 for what is not finite, and whether a head had any.

    A weight of 0 times a value that is not finite would spoil rows that do not see it. NaN in the
    key spoils those that do, and only them.
    """
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    spoiled = tl.max((~finite).to(tl.int32), -1, keep_dims=True) > 0
    return tl.where(finite, value, 0.0), spoiled


@triton.jit(do_not_specialize=["num_blocks"])
def write_kv_cache_kernel(
    k,  # [num_tokens, kv_heads, HEAD_DIM]
    v,  # [num_tokens, kv_heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    values,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    slot_mapping,  # [num_tokens] int64
    num_blocks,
    k_stride,
    v_stride,
    block_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    if slot < 0 or block >= num_blocks:
        return
    d = tl.arange(0, PADDED_DIM)  # [PADDED_DIM]
    inside = d < HEAD_DIM
    key = tl.load(k + token * k_stride + head * HEAD_DIM + d, mask=inside, other=0.0)
    value = tl.load(v + token * v_stride + head * HEAD_DIM + d, mask=inside, other=0.0)
    value, spoiled = keep_finite(value)
    key = tl.where(spoiled, float("nan"), key.to(tl.float32))
    place = block * block_stride + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + d
    tl.store(keys + place, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=inside)


def launch_write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write checked k and v, [num_tokens, kv_heads, head_dim], into one layer's cache."""
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    write_kv_cache_kernel[(num_tokens, kv_heads)](
        *(k, v, keys, values, slot_mapping, keys.shape[0]),
        *(k.stride(0), v.stride(0), keys.stride(0)),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[2],
        num_warps=1,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    types = [f"*{dtype}"] * 4 + ["*i64"] + ["i32"] * 4
    for head_dim in (64, 80, 128, 256):
        padded = triton.next_power_of_2(head_dim)
        constants = {"HEAD_DIM": head_dim, "PADDED_DIM": padded, "BLOCK_SIZE": 16}
        yield KernelCase(write_kv_cache_kernel, dtype, types, constants, 1)
