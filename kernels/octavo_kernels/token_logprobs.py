"""Log-probability of a token: x_id - ln(sum of e^x), over the whole row.

Summed in chunks of fixed places, so that a row's bits depend on that row alone. Knows nothing of
how tokens are chosen.
"""

import torch

from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels._sampling_launch import choose_row_scan


def token_logprobs_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of token_ids [n] in rows [n] of logits, as [n] float32."""
    num_rows, vocab = logits.shape
    known = (rows >= 0) & (rows < num_rows) & (token_ids >= 0) & (token_ids < vocab)
    chosen = logits[rows.clamp(0, max(num_rows - 1, 0))]
    logprobs = chosen.log_softmax(-1).gather(1, token_ids.clamp(0, vocab - 1)[:, None])[:, 0]
    return torch.where(known & chosen.amax(-1).isfinite(), logprobs, torch.nan)


def token_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probability of one token of each of some rows.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like.
        rows: [n] int64, rows of logits.
        token_ids: [n] int64, one of each of these rows.
        out: Receives the result, [n] float32.

    Returns:
        `out`, or a new tensor; NaN where a row or a token does not exist, and for a row that holds
        NaN or infinity, or nothing above -infinity.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_logits("token_logprobs: logits", logits)
    count = rows.numel()
    check_beside("token_logprobs: rows", rows, count, torch.int64, logits)
    check_beside("token_logprobs: token_ids", token_ids, count, torch.int64, logits)
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=logits.device)
    else:
        check_beside("token_logprobs: out", out, count, torch.float32, logits)
    _token_logprobs(logits, rows, token_ids, out)
    return out


@register("token_logprobs", "Tensor logits, Tensor rows, Tensor token_ids, Tensor(a!) out")
def _token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `token_logprobs` of checked tensors into `out`."""
    capability = gpu_capability(logits)
    if capability is not None:
        from octavo_kernels._triton.token_logprobs import launch_token_logprobs

        launch_token_logprobs(logits, rows, token_ids, out, choose_row_scan(capability))
        return
    library = library_for(logits)
    if library is None:
        out.copy_(token_logprobs_reference(logits, rows, token_ids))
        return
    library.octavo_token_logprobs(
        logits.data_ptr(),
        rows.data_ptr(),
        token_ids.data_ptr(),
        out.data_ptr(),
        len(rows),
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )
