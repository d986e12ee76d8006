"""Gated activations on a GPU; see octavo_kernels.silu_and_mul and gelu_and_mul for the formulas."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture, PiecesConfig, choose_gated
from octavo_kernels._triton.ahead_of_time import KernelCase


@triton.jit
def _load_gate_and_up(gate_up_ptr, inner, stride, SIZE: tl.constexpr):
    """Return this program's piece of a row: its gates, its factors, and which columns it has."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gates = gate_up_ptr + tl.program_id(0).to(tl.int64) * stride + column
    held = column < inner
    gate = tl.load(gates, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gates + inner, mask=held, other=0.0).to(tl.float32)
    return gate, up, column, held


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, inner, stride, out_stride, SIZE: tl.constexpr):
    gate, up, column, held = _load_gate_and_up(gate_up_ptr, inner, stride, SIZE)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * out_stride + column, out, mask=held)


@triton.jit
def gelu_and_mul_kernel(gate_up_ptr, out_ptr, inner, stride, out_stride, SIZE: tl.constexpr):
    gate, up, column, held = _load_gate_and_up(gate_up_ptr, inner, stride, SIZE)
    # (1 + tanh(u)) / 2 is 1 / (1 + e^-2u), with 2u = sqrt(8 / pi) * (gate + 0.044715 * gate^3).
    twice = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    out = gate / (1.0 + tl.exp(-twice)) * up
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * out_stride + column, out, mask=held)


_KERNELS = {"silu_and_mul": silu_and_mul_kernel, "gelu_and_mul": gelu_and_mul_kernel}


def launch_gated(name: str, gate_up: torch.Tensor, out: torch.Tensor, config: PiecesConfig) -> None:
    """Compute silu_and_mul or gelu_and_mul of gate_up [tokens, 2 * inner] into out."""
    tokens, inner = out.shape
    _KERNELS[name][(tokens, triton.cdiv(inner, config.block_size))](
        gate_up,
        out,
        inner,
        *(gate_up.stride(0), out.stride(0)),
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    config = choose_gated(capability)
    for kernel in _KERNELS.values():
        types = [f"*{dtype}"] * 2 + ["i32"] * 3
        yield KernelCase(kernel, dtype, types, {"SIZE": config.block_size}, config.num_warps)
