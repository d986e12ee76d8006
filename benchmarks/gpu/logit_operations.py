"""The operations on logits, and the product that gives them, as row_operations lists the others."""

from __future__ import annotations

import math

import torch

from gpu.row_operations import Drawer, Function, RowOperation, Tensors
from octavo_kernels import (
    Penalties,
    SamplingRows,
    apply_penalties,
    apply_penalties_reference,
    apply_token_bitmask,
    apply_token_bitmask_reference,
    greedy,
    greedy_reference,
    linear,
    linear_reference,
    sample,
    sample_reference,
    token_logprobs,
    token_logprobs_reference,
    top_logprobs,
    top_logprobs_reference,
)

_VOCAB = 5003
_LISTED = 60  # tokens that a row has seen
_SINGLE = (torch.float32,)


def logit_operations() -> list[RowOperation]:
    """Return them; all but the product are of float32 alone."""
    return [
        *[
            RowOperation(
                f"linear, {inner} to {outer}", _weight(inner, outer), linear, linear_reference
            )
            for inner, outer in ((100, 33), (1024, 384), (4096, 4096))
        ],
        _of_logits("greedy", _draw_logits, greedy, greedy_reference),
        _of_logits("sample", _draw_sampled, _sample(sample), _sample(sample_reference), 0.02),
        _of_logits(
            *("token_logprobs", _draw_chosen),
            *map(_chosen, (token_logprobs, token_logprobs_reference)),
        ),
        _of_logits(
            *("top_logprobs", _draw_chosen), *map(_listed, (top_logprobs, top_logprobs_reference))
        ),
        _of_logits(
            *("apply_penalties", _draw_seen),
            *map(_penalized, (apply_penalties, apply_penalties_reference)),
        ),
        _of_logits(
            *("apply_token_bitmask", _draw_masked),
            *map(_masked, (apply_token_bitmask, apply_token_bitmask_reference)),
        ),
    ]


def _of_logits(
    name: str, draw: Drawer, compute: Function, reference: Function, most_differing: float = 0.0
) -> RowOperation:
    return RowOperation(name, draw, compute, reference, most_differing, _SINGLE)


def _weight(inner: int, outer: int) -> Drawer:
    def draw(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        weight = torch.randn(outer, inner) / math.sqrt(inner)
        return (torch.randn(rows, inner).to(dtype),), (
            weight.to(dtype),
            torch.randn(outer).to(dtype),
        )

    return draw


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, _VOCAB) * 3


def _draw_logits(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    return (_logits(rows),), ()


def _one_of(values: list[float], rows: int) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (rows,))]


def _draw_sampled(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    how = (
        _one_of([0.0, 0.7, 1.3], rows),
        _one_of([0.0, 40.0, 1000.0], rows).int(),
        _one_of([1.0, 0.9], rows),
        _one_of([0.0, 0.05], rows),
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 8192, (rows,)),
    )
    return (_logits(rows), *how), ()


def _sample(function: Function) -> Function:
    return lambda logits, *how: function(logits, SamplingRows(*how))


def _draw_chosen(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    return (_logits(rows), torch.randint(0, _VOCAB, (rows,))), ()


def _chosen(function: Function) -> Function:
    return lambda logits, ids: function(logits, _every_row(logits), ids)


def _listed(function: Function) -> Function:
    return lambda logits, ids: function(logits, _every_row(logits), ids, 5)


def _draw_seen(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    seen = torch.stack([torch.randperm(_VOCAB)[:_LISTED] for _ in range(rows)])
    counts = torch.randint(0, 4, (rows, _LISTED), dtype=torch.int32)
    factors = torch.rand(3, rows)
    return (_logits(rows), seen, counts, factors[0] + 1, factors[1], factors[2]), ()


def _penalized(function: Function) -> Function:
    def apply(
        logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, *by: torch.Tensor
    ) -> torch.Tensor:
        starts = torch.arange(len(logits) + 1, device=logits.device) * _LISTED
        listed = (seen.flatten(), counts.flatten())
        result: torch.Tensor = function(logits, Penalties(_every_row(logits), starts, *listed, *by))
        return result

    return apply


def _draw_masked(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    words = -(-_VOCAB // 32)
    return (_logits(rows), torch.randint(-(2**31), 2**31, (rows, words)).int()), ()


def _masked(function: Function) -> Function:
    return lambda logits, bitmask: function(logits, bitmask, _every_row(logits))


def _every_row(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits), device=logits.device)
