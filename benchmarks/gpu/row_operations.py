"""Operations that work row by row: what each is given, its fast path and its reference.

One list serves both checks: a row agrees with the reference, and its bits are its own whatever the
rows beside it. Knows nothing of how a fast path is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from octavo_kernels import (
    add_rms_norm,
    add_rms_norm_reference,
    apply_rope,
    apply_rope_reference,
    gelu_and_mul,
    gelu_and_mul_reference,
    rms_norm,
    rms_norm_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Any]
Drawer = Callable[[int, torch.dtype], tuple[Tensors, Tensors]]
"""Of a number of rows: tensors that have so many rows, then those that all rows share."""

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class RowOperation:
    """An operation and its inputs; results have one row for each row of the inputs."""

    name: str
    draw: Drawer
    compute: Function
    """Takes the tensors of rows, then the shared ones; returns one tensor or several."""
    reference: Function
    most_differing: float = 0.0
    """Share of whole results, such as token ids, that may differ from the reference's: where the
    drawn number lies at the edge of a token's share, rounding decides."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def results_of(function: Function, rows: Tensors, shared: Tensors) -> Tensors:
    """Return the results as a tuple."""
    result = function(*rows, *shared)
    return result if isinstance(result, tuple) else (result,)


def row_operations() -> list[RowOperation]:
    """Return all operations, at odd sizes and at those of models."""
    operations = []
    for hidden in (100, 1024, 4096):
        name = f"of {hidden}"
        operations += [
            RowOperation(f"rms_norm {name}", _norm(hidden), _rms_norm, _rms_norm_reference),
            RowOperation(
                f"add_rms_norm {name}",
                _added(hidden),
                partial(add_rms_norm, eps=_EPS),
                partial(add_rms_norm_reference, eps=_EPS),
            ),
        ]
    for inner in (33, 1537, 8192):
        operations += [
            RowOperation(
                f"silu_and_mul of {inner}", _gate_up(inner), silu_and_mul, silu_and_mul_reference
            ),
            RowOperation(
                f"gelu_and_mul of {inner}", _gate_up(inner), gelu_and_mul, gelu_and_mul_reference
            ),
        ]
    for head_dim, rotary_dim, interleaved in ((64, 64, False), (80, 32, True), (128, 128, False)):
        kind = "interleaved" if interleaved else "halves"
        operations.append(
            RowOperation(
                f"apply_rope {kind}, {rotary_dim} of {head_dim}",
                _heads(head_dim, rotary_dim),
                partial(apply_rope, interleaved=interleaved),
                partial(apply_rope_reference, interleaved=interleaved),
            )
        )
    return operations


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, weight, _EPS)


def _rms_norm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm_reference(x, weight, _EPS)


def _norm(hidden: int) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        return (torch.randn(rows, hidden).to(dtype),), (torch.randn(hidden),)

    return draw


def _added(hidden: int) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        x, residual = torch.randn(2, rows, hidden).to(dtype)
        return (x, residual), (torch.randn(hidden),)

    return draw


def _gate_up(inner: int) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        return ((torch.randn(rows, 2 * inner) * 4).to(dtype),), ()

    return draw


def _heads(head_dim: int, rotary_dim: int) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        q = torch.randn(rows, 12, head_dim).to(dtype)
        k = torch.randn(rows, 3, head_dim).to(dtype)
        angles = torch.randn(500, rotary_dim // 2)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        return (q, k, torch.randint(0, 500, (rows,))), (cos_sin,)

    return draw
