"""Rotation of queries and keys, and the write of keys and values, in one kernel on a GPU.

The bits are those of apply_rope and then write_kv_cache. Not measured on a GPU.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, HeadsConfig, apply_rope_configs
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels._triton.apply_rope import load_angles, pair_offsets, turn, turn_heads
from octavo_kernels._triton.write_kv_cache import keep_finite


@triton.jit
def _write_heads(
    k,
    v,
    keys,
    values,
    first_head,
    kv_heads,
    half,
    cosine,
    sine,
    slot,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write a block of heads of one token; keys and values begin at the slot's block."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, PADDED_DIM)[None, :]
    at, to = head * HEAD_DIM, (head * BLOCK_SIZE + slot) * HEAD_DIM
    inside = (head < kv_heads) & (d < HEAD_DIM)
    value = tl.load(v + at + d, mask=inside, other=0.0)  # [HEADS, PADDED_DIM]
    value, spoiled = keep_finite(value)
    tl.store(values + to + d, value.to(values.dtype.element_ty), mask=inside)
    held = (head < kv_heads) & (tl.arange(0, HALF)[None, :] < half)
    low_at, high_at = pair_offsets(half, HALF, INTERLEAVED)
    low = tl.load(k + at + low_at, mask=held, other=0.0)  # [HEADS, HALF]
    high = tl.load(k + at + high_at, mask=held, other=0.0)
    low, high = turn(low, high, cosine, sine)
    tl.store(keys + to + low_at, tl.where(spoiled, float("nan"), low), mask=held)
    tl.store(keys + to + high_at, tl.where(spoiled, float("nan"), high), mask=held)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < kv_heads) & (column < HEAD_DIM)
        rest = tl.load(k + at + column, mask=kept, other=0.0).to(tl.float32)
        tl.store(keys + to + column, tl.where(spoiled, float("nan"), rest), mask=kept)


@triton.jit(do_not_specialize=["num_blocks"])
def rope_and_write_kv_cache_kernel(
    q,  # [num_tokens, q_heads, HEAD_DIM]
    k,  # [num_tokens, kv_heads, HEAD_DIM]
    v,  # [num_tokens, kv_heads, HEAD_DIM]
    q_out,  # [num_tokens, q_heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    values,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM] of one layer
    positions,  # [num_tokens] int64
    cos_sin,  # [max_len, 2 * half] float32
    slot_mapping,  # [num_tokens] int64
    q_heads,
    kv_heads,
    half,
    max_len,
    num_blocks,
    q_stride,
    k_stride,
    v_stride,
    q_out_stride,
    block_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cosine, sine = load_angles(cos_sin, tl.load(positions + token), half, max_len, HALF)
    q_blocks = tl.cdiv(q_heads, HEADS)
    part = tl.program_id(1)
    if part < q_blocks:
        turn_heads(
            q + token * q_stride,
            q_out + token * q_out_stride,
            part * HEADS,
            q_heads,
            HEAD_DIM,
            half,
            cosine,
            sine,
            HEADS,
            HALF,
            REST,
            INTERLEAVED,
        )
    else:
        slot = tl.load(slot_mapping + token)
        block = slot // BLOCK_SIZE
        if (slot >= 0) & (block < num_blocks):
            _write_heads(
                k + token * k_stride,
                v + token * v_stride,
                keys + block * block_stride,
                values + block * block_stride,
                (part - q_blocks) * HEADS,
                kv_heads,
                half,
                cosine,
                sine,
                slot % BLOCK_SIZE,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                HEADS,
                HALF,
                REST,
                INTERLEAVED,
            )


def launch_rope_and_write_kv_cache(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    layer: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    config: HeadsConfig,
    *,
    interleaved: bool,
) -> None:
    """Turn the heads of q and k, checked, and write one layer's cache.

    Args:
        tensors: q, k, v and q_out.
        layer: Its keys and values, each [num_blocks, kv_heads, block_size, head_dim].
        positions: [num_tokens] int64.
        cos_sin: [max_len, rotary_dim] float32.
        slot_mapping: [num_tokens] int64.
        config: As `choose_apply_rope` gives it.
        interleaved: Whether pairs lie side by side.
    """
    q, k, v, q_out = tensors
    keys, values = layer
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    if num_tokens == 0:
        return
    rest = head_dim - 2 * half
    parts = triton.cdiv(q_heads, config.block_heads) + triton.cdiv(kv_heads, config.block_heads)
    rope_and_write_kv_cache_kernel[(num_tokens, parts)](
        *(*tensors, keys, values, positions, cos_sin, slot_mapping),
        *(q_heads, kv_heads, half, cos_sin.shape[0], keys.shape[0]),
        *(q.stride(0), k.stride(0), v.stride(0), q_out.stride(0), keys.stride(0)),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[2],
        HEADS=config.block_heads,
        HALF=config.block_half,
        REST=triton.next_power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    types = [f"*{dtype}"] * 6 + ["*i64", "*fp32", "*i64"] + ["i32"] * 10
    for config in apply_rope_configs(capability):
        for interleaved in (False, True):
            # A rest is written alike by both, so one of them is compiled with it.
            constants = {
                "HEAD_DIM": 2 * config.block_half,
                "PADDED_DIM": 2 * config.block_half,
                "BLOCK_SIZE": 16,
                "HEADS": config.block_heads,
                "HALF": config.block_half,
                "REST": config.block_half if interleaved else 0,
                "INTERLEAVED": interleaved,
            }
            yield KernelCase(
                rope_and_write_kv_cache_kernel, dtype, types, constants, config.num_warps
            )
