"""What the operations on logits share: the checks of their arguments. Knows no operation."""

import torch

from octavo_kernels._check import check_tensor


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
    check_tensor(name, tensor, (size,), dtypes=(dtype,))
    if tensor.device != logits.device:
        raise ValueError(f"{name} is on {tensor.device} but must be on {logits.device}")
