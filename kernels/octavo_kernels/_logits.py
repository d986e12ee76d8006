"""What operations on logits are told of rows, and the checks of their arguments.

Knows no operation.
"""

from dataclasses import dataclass

import torch

from octavo_kernels._check import check_tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row's token is drawn; every tensor is [rows], beside the logits."""

    temperature: torch.Tensor
    """float32; 0 takes the best, the first of several."""
    top_k: torch.Tensor
    """int32; 0 keeps all."""
    top_p: torch.Tensor
    """float32; 1 keeps all."""
    min_p: torch.Tensor
    """float32; 0 keeps all."""
    seeds: torch.Tensor
    """int64, any value."""
    positions: torch.Tensor
    """int64; absolute position of the token that is drawn."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Which tokens are penalised, and how; every tensor lies beside the logits.

    Row `rows[i]` of the logits has the tokens `[row_starts[i], row_starts[i + 1])`.
    """

    rows: torch.Tensor
    """[n] int64, each row once; one outside the logits is passed over."""
    row_starts: torch.Tensor
    """[n + 1] int64, from 0, never falling, up to the number of tokens."""
    token_ids: torch.Tensor
    """[tokens] int64, each once in its row; one outside the vocabulary is passed over."""
    output_counts: torch.Tensor
    """[tokens] int32; 0 for a token of the prompt alone."""
    repetition: torch.Tensor
    """[n] float32; 1 changes nothing."""
    presence: torch.Tensor
    """[n] float32; 0 changes nothing."""
    frequency: torch.Tensor
    """[n] float32; 0 changes nothing."""


def check_logits(name: str, logits: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Refuse logits that are not [rows, vocab] float32 with contiguous rows of at least one.

    Args:
        name: What the message calls them.
        logits: The logits; rows may be strided.
        like: Logits of the same shape and device.

    Raises:
        ValueError: They do not fit.
    """
    shape = (None, None) if like is None else like.shape
    check_tensor(name, logits, shape, dtypes=(torch.float32,), like=like)
    if logits.shape[1] == 0:
        raise ValueError(f"{name} has shape {list(logits.shape)} but must have a vocabulary")


def check_beside(
    name: str, tensor: torch.Tensor, size: int | None, dtype: torch.dtype, logits: torch.Tensor
) -> None:
    """Refuse a vector that is not contiguous, of this size and type and where the logits are.

    Raises:
        ValueError: It does not fit.
    """
    check_tensor(name, tensor, (size,), dtypes=(dtype,), beside=logits)
