"""The operations of a mixture of experts, as row_operations lists the others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.row_operations import Function, RowOperation, Tensors
from octavo.model.experts import choose_experts, group_by_expert
from octavo.model.spec import ExpertSpec
from octavo_kernels import (
    grouped_linear,
    grouped_linear_reference,
    weighted_sum,
    weighted_sum_reference,
)

_SPEC = ExpertSpec(
    num_experts=11,
    experts_per_token=3,
    intermediate_size=100,
    normalizes_weights=True,
    layers=(True,),
)


def expert_operations() -> list[RowOperation]:
    """Return them: the choice of experts, and products in groups added up again."""
    references = _mixed(grouped_linear_reference, weighted_sum_reference)
    return [
        RowOperation("choice of experts", _draw_logits, _choose, _choose, 0.01, (torch.float32,)),
        RowOperation(
            "grouped_linear and weighted_sum",
            _draw_rows,
            _mixed(grouped_linear, weighted_sum),
            references,
        ),
    ]


def _draw_logits(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    return (torch.randn(rows, _SPEC.num_experts),), ()


def _choose(logits: torch.Tensor) -> Tensors:
    return tuple(choose_experts(logits, _SPEC))


def _draw_rows(rows: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    inner = _SPEC.intermediate_size
    choice = choose_experts(torch.randn(rows, _SPEC.num_experts), _SPEC)
    weight = (torch.randn(_SPEC.num_experts, 77, inner) / inner**0.5).to(dtype)
    return (torch.randn(rows, inner).to(dtype), choice.experts, choice.weights), (weight,)


def _mixed(multiply: Callable[..., torch.Tensor], add: Callable[..., torch.Tensor]) -> Function:
    def compute(
        x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        groups = group_by_expert(experts, _SPEC.num_experts)
        return add(multiply(x[groups.tokens], weight, groups.starts), groups.places, weights)

    return compute
