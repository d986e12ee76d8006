"""Rule tokens out: of each masked row, the logit of a token whose bit is 0 becomes -infinity.

Bit i % 32 of word i // 32 belongs to token i, as structured output's libraries lay their masks out.
Tokens beyond the words are ruled out too: a model's vocabulary may be padded. Knows no grammar.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels._sampling_launch import choose_bitmask


def apply_token_bitmask_reference(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return logits [rows, vocab] with the tokens ruled out that bitmask [n, words] clears."""
    num_rows, vocab = logits.shape
    bits = (bitmask[:, :, None] >> torch.arange(32, device=logits.device)) & 1
    bits = torch.nn.functional.pad(bits.flatten(1), (0, vocab))[:, :vocab]
    known = (rows >= 0) & (rows < num_rows)
    ruled_out = torch.zeros(num_rows + 1, vocab, dtype=torch.int32, device=logits.device)
    ruled_out.index_add_(0, torch.where(known, rows, num_rows), (bits == 0).int())
    return logits.masked_fill(ruled_out[:-1] > 0, -torch.inf)


def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rule out the tokens of some rows whose bits are 0.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like.
        bitmask: [n, words] int32, rows contiguous with each other.
        rows: [n] int64, which rows of logits; one outside is passed over.
        out: Receives the result, like logits; may be logits, and then nothing else is touched.

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_logits("apply_token_bitmask: logits", logits)
    check_beside("apply_token_bitmask: rows", rows, None, torch.int64, logits)
    check_tensor(
        *("apply_token_bitmask: bitmask", bitmask, (len(rows), None)),
        dtypes=(torch.int32,),
        beside=logits,
        packed=2,
    )
    if out is None:
        out = logits.clone(memory_format=torch.contiguous_format)
    elif out is not logits:
        check_logits("apply_token_bitmask: out", out, like=logits)
        out.copy_(logits)
    _apply_token_bitmask(out, bitmask, rows)
    return out


@register("apply_token_bitmask", "Tensor(a!) logits, Tensor bitmask, Tensor rows")
def _apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Compute `apply_token_bitmask` of checked tensors in place."""
    capability = gpu_capability(logits)
    if capability is not None:
        from octavo_kernels._triton.apply_token_bitmask import launch_apply_token_bitmask

        launch_apply_token_bitmask(logits, bitmask, rows, choose_bitmask(capability))
        return
    library = library_for(logits)
    if library is None:
        logits.copy_(apply_token_bitmask_reference(logits, bitmask, rows))
        return
    library.octavo_apply_token_bitmask(
        logits.data_ptr(),
        bitmask.data_ptr(),
        rows.data_ptr(),
        *bitmask.shape,
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )
