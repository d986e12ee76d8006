"""Rotary position embedding on a GPU; see octavo_kernels.apply_rope for the formula."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, HeadsConfig, apply_rope_configs
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit
def load_angles(cos_sin_ptr, position, half, max_len, HALF: tl.constexpr):
    """Return the cosines and sines [1, HALF] of a position.

    A position outside the table reads no memory: its angles are NaN.
    """
    pair = tl.arange(0, HALF)[None, :]
    held = (pair < half) & (position >= 0) & (position < max_len)
    angles = cos_sin_ptr + position * (2 * half) + pair
    cosine = tl.load(angles, mask=held, other=float("nan"))
    sine = tl.load(angles + half, mask=held, other=float("nan"))
    return cosine, sine


@triton.jit
def pair_offsets(half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return where in a head the two elements of each pair lie, both [1, HALF]."""
    pair = tl.arange(0, HALF)[None, :]
    low_at = 2 * pair if INTERLEAVED else pair
    return low_at, low_at + (1 if INTERLEAVED else half)


@triton.jit
def turn(low, high, cosine, sine):
    """Turn pairs in float32; what is fused is said here, so that all kernels give the same bits."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    return tl.fma(low, cosine, -(high * sine)), tl.fma(high, cosine, low * sine)


@triton.jit
def turn_heads(
    x_ptr,
    out_ptr,
    first_head,
    num_heads,
    head_dim,
    half,
    cosine,
    sine,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turn a block of heads of one token; copy what lies past the 2 * half turned elements."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    held = (head < num_heads) & (tl.arange(0, HALF)[None, :] < half)
    low_at, high_at = pair_offsets(half, HALF, INTERLEAVED)
    at = head * head_dim
    low = tl.load(x_ptr + at + low_at, mask=held, other=0.0)  # [HEADS, HALF]
    high = tl.load(x_ptr + at + high_at, mask=held, other=0.0)
    low, high = turn(low, high, cosine, sine)
    tl.store(out_ptr + at + low_at, low, mask=held)
    tl.store(out_ptr + at + high_at, high, mask=held)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < num_heads) & (column < head_dim)
        rest = tl.load(x_ptr + at + column, mask=kept)
        tl.store(out_ptr + at + column, rest, mask=kept)


@triton.jit
def apply_rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_heads,
    k_heads,
    head_dim,
    half,
    max_len,
    q_stride,
    k_stride,
    q_out_stride,
    k_out_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    cosine, sine = load_angles(cos_sin_ptr, position, half, max_len, HALF)
    q_blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(1)
    if block < q_blocks:
        turn_heads(
            q_ptr + token * q_stride,
            q_out_ptr + token * q_out_stride,
            block * HEADS,
            q_heads,
            head_dim,
            half,
            cosine,
            sine,
            HEADS,
            HALF,
            REST,
            INTERLEAVED,
        )
    else:
        turn_heads(
            k_ptr + token * k_stride,
            k_out_ptr + token * k_out_stride,
            (block - q_blocks) * HEADS,
            k_heads,
            head_dim,
            half,
            cosine,
            sine,
            HEADS,
            HALF,
            REST,
            INTERLEAVED,
        )


def launch_apply_rope(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    config: HeadsConfig,
    *,
    interleaved: bool,
) -> None:
    """Turn the heads of q and k; tensors are q, k, q_out and k_out."""
    q, k, q_out, k_out = tensors
    tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    blocks = triton.cdiv(q_heads, config.block_heads) + triton.cdiv(k_heads, config.block_heads)
    apply_rope_kernel[(tokens, blocks)](
        *tensors,
        positions,
        cos_sin,
        *(q_heads, k_heads, head_dim, half, cos_sin.shape[0]),
        *(q.stride(0), k.stride(0), q_out.stride(0), k_out.stride(0)),
        HEADS=config.block_heads,
        HALF=config.block_half,
        REST=triton.next_power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    types = [f"*{dtype}"] * 4 + ["*i64", "*fp32"] + ["i32"] * 9
    for config in apply_rope_configs(capability):
        for interleaved in (False, True):
            # A rest is copied alike by both, so one of them is compiled with it.
            constants = {
                "HEADS": config.block_heads,
                "HALF": config.block_half,
                "REST": config.block_half if interleaved else 0,
                "INTERLEAVED": interleaved,
            }
            yield KernelCase(apply_rope_kernel, dtype, types, constants, config.num_warps)
