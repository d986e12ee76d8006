"""Normalisation of queries and keys before they are rotated, in the ways that families do it.

Knows nothing of how they were made or what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.model.norms import LayerNorm, Norm

Sum = Callable[[torch.Tensor], None]
"""Replaces a tensor by its sum over the ranks that share a layer, to the same bits in all."""


class HeadNorms(Protocol):
    """Normalises the queries and keys of a layer."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, sum_: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return them normalised.

        Args:
            q: [num_tokens, heads of the part, head_dim].
            k: the same of keys.
            sum_: over the ranks that have the other heads.
        """
        ...


@dataclass(frozen=True, slots=True)
class AlikeHeadNorms:
    """Every head by the same weight."""

    q: Norm
    k: Norm

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, sum_: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys normalised; nothing is summed."""
        return self.q(q), self.k(k)


@dataclass(frozen=True, slots=True)
class JointHeadNorms:
    """All heads as one row, of a rank that has them all."""

    q: Norm
    k: Norm

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, sum_: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys normalised; nothing is summed."""
        return self.q(q.flatten(1)).view(q.shape), self.k(k.flatten(1)).view(k.shape)


@dataclass(frozen=True, slots=True)
class OwnHeadNorms:
    """Each head by mean and variance, and by a weight of its own."""

    plain: LayerNorm
    """That changes no more."""
    q_weight: torch.Tensor
    """[heads, head_dim] float32."""
    k_weight: torch.Tensor

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, sum_: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys normalised, rounded once; nothing is summed."""
        return self._scaled(q, self.q_weight), self._scaled(k, self.k_weight)

    def _scaled(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (self.plain(heads.float()) * weight).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class DividedHeadNorms:
    """All heads as one row by the root of the mean square, of a rank that has some of them.

    The ranks exchange two numbers a token: their sums of squares of queries and of keys.
    """

    q_weight: torch.Tensor
    """[heads of the part, head_dim] float32."""
    k_weight: torch.Tensor
    eps: float
    sizes: torch.Tensor
    """[2] float32: how many numbers all queries of a token have, and all keys."""
    counts_keys: bool
    """Whether the sum has the part's keys: of several ranks with the same ones, one adds them."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, sum_: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys normalised; every rank of the group calls it."""
        squares = _sums_of_squares(q, k)
        if not self.counts_keys:
            squares[:, 1].zero_()
        sum_(squares)
        factors = torch.rsqrt(squares / self.sizes + self.eps)[..., None, None]
        return (
            (q.float() * factors[:, 0] * self.q_weight).to(q.dtype),
            (k.float() * factors[:, 1] * self.k_weight).to(k.dtype),
        )


def _sums_of_squares(*parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a token's numbers in each part, [num_tokens, parts] float32.

    Halves are added until one column is left: which terms meet depends on nothing but the length
    of a row, while a device's own sums may depend on how many rows there are.
    """
    rows = [part.float().square().flatten(1) for part in parts]
    width = 1 << (max(row.shape[1] for row in rows) - 1).bit_length()
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows]
    squares = torch.stack(padded, 1)
    while width > 1:
        width //= 2
        squares = squares[..., :width] + squares[..., width:]
    return squares[..., 0]
