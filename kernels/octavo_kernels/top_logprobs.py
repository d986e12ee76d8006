"""Log-probability and rank of a token, and of the most likely ones of its row.

A rank is 1 + the number of tokens with a larger logit, so equal ones share theirs. Of equal ones
the lowest ids come first. Sums are those of token_logprobs: a row's bits depend on it alone. Knows
nothing of how tokens are chosen.
"""

from typing import NamedTuple

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels.token_logprobs import token_logprobs, token_logprobs_reference


class TopLogprobs(NamedTuple):
    """Of each row a given token in column 0, then the k most likely ones; all are [n, 1 + k].

    -1, NaN and 0 where the row or the token does not exist, or the row holds NaN or infinity, or
    nothing above -infinity.
    """

    token_ids: torch.Tensor
    """int64"""
    logprobs: torch.Tensor
    """float32"""
    ranks: torch.Tensor
    """int64"""


def top_logprobs_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int
) -> TopLogprobs:
    """Return how likely token_ids [n] in rows [n] of logits are, and the k most likely beside."""
    num_rows, vocab = logits.shape
    chosen = logits[rows.clamp(0, max(num_rows - 1, 0))]
    falling = (-chosen).sort(stable=True)
    ids = torch.cat([token_ids[:, None], falling.indices[:, :k]], dim=1)
    known_ids = ids.clamp(0, vocab - 1)
    ranks = 1 + torch.searchsorted(falling.values, -chosen.gather(1, known_ids))
    exists = ~token_logprobs_reference(logits, rows, token_ids).isnan()[:, None]
    logprobs = chosen.log_softmax(-1).gather(1, known_ids)
    return _without(exists, ids, logprobs, ranks)


def top_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    k: int,
    *,
    out: TopLogprobs | None = None,
) -> TopLogprobs:
    """Return the log-probability and rank of one token of each of some rows, and of the k best.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like.
        rows: [n] int64, rows of logits.
        token_ids: [n] int64, one of each of these rows.
        k: 0 to vocab.
        out: Receives the result.

    Returns:
        `out`, or new tensors.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or k is out of range.
    """
    check_logits("top_logprobs: logits", logits)
    count = rows.numel()
    check_beside("top_logprobs: rows", rows, count, torch.int64, logits)
    check_beside("top_logprobs: token_ids", token_ids, count, torch.int64, logits)
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"top_logprobs: k is {k} but must be from 0 to {logits.shape[1]}")
    if out is None:
        ids = torch.empty((count, 1 + k), dtype=torch.int64, device=logits.device)
        out = TopLogprobs(
            ids, ids.new_empty(ids.shape, dtype=torch.float32), ids.new_empty(ids.shape)
        )
    else:
        _check_out(out, count, k, logits)
    _top_logprobs(logits, rows, token_ids, *out)
    return out


def _check_out(out: TopLogprobs, count: int, k: int, logits: torch.Tensor) -> None:
    dtypes = (torch.int64, torch.float32, torch.int64)
    for name, tensor, dtype in zip(TopLogprobs._fields, out, dtypes, strict=True):
        check_tensor(
            *(f"top_logprobs: out {name}", tensor, (count, 1 + k)),
            dtypes=(dtype,),
            beside=logits,
            packed=2,
        )


@register(
    "top_logprobs",
    "Tensor logits, Tensor rows, Tensor token_ids, Tensor(a!) out_ids, Tensor(b!) out_logprobs, "
    "Tensor(c!) out_ranks",
)
def _top_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    out_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
) -> None:
    """Compute `top_logprobs` of checked tensors into the last three."""
    k = out_ids.shape[1] - 1
    library = library_for(logits)
    if library is None:
        on_gpu = gpu_capability(logits) is not None
        compute = _in_torch_operations if on_gpu else top_logprobs_reference
        for target, result in zip(
            (out_ids, out_logprobs, out_ranks), compute(logits, rows, token_ids, k), strict=True
        ):
            target.copy_(result)
        return
    library.octavo_top_logprobs(
        logits.data_ptr(),
        rows.data_ptr(),
        token_ids.data_ptr(),
        out_ids.data_ptr(),
        out_logprobs.data_ptr(),
        out_ranks.data_ptr(),
        k,
        len(rows),
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )


def _in_torch_operations(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int
) -> TopLogprobs:
    """Compute the same for a GPU: no row is sorted, and sums have the order of the kernel's."""
    num_rows, vocab = logits.shape
    chosen = logits[rows.clamp(0, max(num_rows - 1, 0))]
    # One number that orders by logit, then by id: where bits are read as integers, those of
    # positive floats rise with them, and those of negative ones fall.
    bits = (chosen + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (rising << 32) - torch.arange(vocab, device=logits.device)
    best = chosen.new_empty((len(rows), 0), dtype=torch.int64)
    if k:
        best = -(keys.topk(k).values << 32 >> 32)
    ids = torch.cat([token_ids[:, None], best], dim=1)
    picked = chosen.gather(1, ids.clamp(0, vocab - 1))
    first = 1 + (chosen > picked[:, :1]).sum(1, keepdim=True)
    others = 1 + (picked[:, None, 1:] > picked[:, 1:, None]).sum(2)
    repeated = rows.repeat_interleave(1 + k)
    logprobs = token_logprobs(logits, repeated, ids.reshape(-1)).view(ids.shape)
    exists = ~logprobs[:, :1].isnan()
    return _without(exists, ids, logprobs, torch.cat([first, others], dim=1))


def _without(
    exists: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> TopLogprobs:
    """Return results as they are, but for rows where there is nothing."""
    return TopLogprobs(
        torch.where(exists, ids, -1),
        torch.where(exists, logprobs, torch.nan),
        torch.where(exists, ranks, 0),
    )
