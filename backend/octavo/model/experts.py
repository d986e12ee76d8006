"""A mixture of experts, which stands for the MLP of a layer: a few small ones for each token.

A router gives each token a probability of every expert; the likeliest few compute, and what they
make is added up, times their probabilities. Rows are sorted by expert, so that each weight is read
once for all of its rows. Knows nothing of layers, checkpoints or ranks.

A token's bits depend on the token alone: probabilities are found row by row in float32; of equal
ones the expert of the lower index is the likelier; products have the same bits in any group. What
the experts make is added in float32, the likeliest first, whichever of them had their rows where.
That is the order of transformers' default (`grouped_mm`), which adds along the chosen experts; its
`eager` form adds in the order of their indices. Probabilities stay in float32, as Mixtral's do
there; Qwen3-MoE and OLMoE round theirs to the model's dtype first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo.model.spec import ExpertSpec
from octavo_kernels import weighted_sum


class Choice(NamedTuple):
    """The experts of each token, the likeliest first; both are [tokens, experts_per_token]."""

    experts: torch.Tensor
    """int64."""
    weights: torch.Tensor
    """float32."""


class Groups(NamedTuple):
    """Rows sorted by expert: one for each token and expert of it."""

    tokens: torch.Tensor
    """[rows] int64, whose row each is."""
    starts: torch.Tensor
    """[num_experts + 1] int64: an expert has the rows from its start to that of the next."""
    places: torch.Tensor
    """[tokens, experts_per_token] int64, where the rows of each token are."""


class Experts:
    """Compute a mixture of experts of each row.

    Args:
        spec: of the part.
        router: hidden -> a logit of each expert.
        gate_up: hidden -> gate, then up, of each expert; gated.
        down: the other way back, of each expert.
    """

    def __init__(
        self, spec: ExpertSpec, router: PackedLinear, gate_up: GroupedLinear, down: GroupedLinear
    ) -> None:
        self.spec = spec
        self._router = router
        self._gate_up = gate_up
        self._down = down

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of hidden [tokens, size], in memory of its own."""
        logits = hidden.new_empty((len(hidden), self.spec.num_experts), dtype=torch.float32)
        choice = choose_experts(self._router(hidden, out=logits), self.spec)
        tokens, starts, places = group_by_expert(choice.experts, self.spec.num_experts)
        made = self._down(self._gate_up.silu(hidden[tokens], starts), starts)
        return weighted_sum(made, places, choice.weights)


def choose_experts(logits: torch.Tensor, spec: ExpertSpec) -> Choice:
    """Choose the experts of each token by its logits [tokens, num_experts], float32."""
    count = spec.experts_per_token
    # Not topk: which of equal ones it takes depends on its algorithm.
    probabilities, experts = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = probabilities[:, :count]
    if spec.normalizes_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts[:, :count], weights.contiguous())


def group_by_expert(experts: torch.Tensor, num_experts: int) -> Groups:
    """Sort the pairs of a token and an expert of it, experts [tokens, count], by expert.

    The host need not know how many rows an expert has.
    """
    chosen, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=experts.device)
    starts = torch.searchsorted(chosen, bounds)
    return Groups(order // experts.shape[1], starts, places.view(experts.shape))
