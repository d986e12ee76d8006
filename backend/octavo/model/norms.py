"""Normalisation of states, by a weight of its own. Knows nothing of where in a model it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo_kernels import add_rms_norm, layer_norm, rms_norm


class Norm(Protocol):
    """Normalises the rows of a state over their last dimension."""

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of x normalised, in `out` if given; it may be x."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + residual normalised, and x + residual."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """By the root of the mean square."""

    weight: torch.Tensor
    """[size] float32."""
    eps: float

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of x normalised, in `out` if given; it may be x."""
        return rms_norm(x, self.weight, self.eps, out=out)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + residual normalised, and x + residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """By mean and variance."""

    weight: torch.Tensor
    """[size] float32."""
    bias: torch.Tensor
    """Like weight."""
    eps: float

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of x normalised, in `out` if given; it may be x."""
        return layer_norm(x, self.weight, self.bias, self.eps, out=out)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + residual normalised, and x + residual."""
        total = x + residual
        return self(total), total
