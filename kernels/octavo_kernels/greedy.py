"""Greedy choice: the token of the largest logit, and of several equal ones the first.

Knows nothing of sequences or of other ways to choose.
"""

import torch

from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels._sampling_launch import choose_row_scan


def greedy_reference(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest of each row of logits [rows, vocab], as [rows] int64."""
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == best, ids, logits.shape[1]).amin(-1)
    return torch.where(best[:, 0].isfinite(), first, -1)


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the token of the largest logit of each row, the first of several.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like.
        out: Receives the result, [rows] int64.

    Returns:
        `out`, or a new tensor; -1 for a row that holds NaN or infinity, or nothing above -infinity.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_logits("greedy: logits", logits)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    else:
        check_beside("greedy: out", out, logits.shape[0], torch.int64, logits)
    _greedy(logits, out)
    return out


@register("greedy", "Tensor logits, Tensor(a!) out")
def _greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `greedy` of checked tensors into `out`."""
    capability = gpu_capability(logits)
    if capability is not None:
        from octavo_kernels._triton.greedy import launch_greedy

        launch_greedy(logits, out, choose_row_scan(capability))
        return
    library = library_for(logits)
    if library is None:
        out.copy_(greedy_reference(logits))
        return
    library.octavo_greedy(
        logits.data_ptr(),
        out.data_ptr(),
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )
