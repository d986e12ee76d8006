"""Penalise tokens that a row has seen.

For each listed token of logit x, which the row's output holds `count` times:

    x is multiplied by the repetition penalty if it is negative, else divided by it; then
    frequency * count, and presence if count > 0, are subtracted

The first is transformers' RepetitionPenaltyLogitsProcessor, of tokens of prompt and output; the
others are those of OpenAI's interface. Only listed logits are touched. Knows nothing of sequences.
"""

import torch

from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import Penalties, check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels._sampling_launch import choose_penalties


def apply_penalties_reference(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Return logits [rows, vocab] with the penalties applied."""
    out = logits.clone()
    for i, row in enumerate(penalties.rows.tolist()):
        start, end = penalties.row_starts[i : i + 2].tolist()
        ids, counts = penalties.token_ids[start:end], penalties.output_counts[start:end]
        known = (ids >= 0) & (ids < logits.shape[1])
        if not 0 <= row < len(logits):
            continue
        ids, counts = ids[known], counts[known]
        x, factor = out[row, ids], penalties.repetition[i]
        x = torch.where(x < 0, x * factor, x / factor) - penalties.frequency[i] * counts
        out[row, ids] = torch.where(counts > 0, x - penalties.presence[i], x)
    return out


def apply_penalties(
    logits: torch.Tensor, penalties: Penalties, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Penalise tokens that some rows have seen.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like.
        penalties: Which and how.
        out: Receives the result, like logits; may be logits, and then nothing else is touched.

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_logits("apply_penalties: logits", logits)
    count, num_tokens = penalties.rows.numel(), penalties.token_ids.numel()
    for name, tensor, size, dtype in (
        ("rows", penalties.rows, count, torch.int64),
        ("row_starts", penalties.row_starts, count + 1, torch.int64),
        ("token_ids", penalties.token_ids, num_tokens, torch.int64),
        ("output_counts", penalties.output_counts, num_tokens, torch.int32),
        ("repetition", penalties.repetition, count, torch.float32),
        ("presence", penalties.presence, count, torch.float32),
        ("frequency", penalties.frequency, count, torch.float32),
    ):
        check_beside(f"apply_penalties: {name}", tensor, size, dtype, logits)
    if out is None:
        out = logits.clone(memory_format=torch.contiguous_format)
    elif out is not logits:
        check_logits("apply_penalties: out", out, like=logits)
        out.copy_(logits)
    _apply_penalties(
        out,
        penalties.rows,
        penalties.row_starts,
        penalties.token_ids,
        penalties.output_counts,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
    )
    return out


@register(
    "apply_penalties",
    "Tensor(a!) logits, Tensor rows, Tensor row_starts, Tensor token_ids, Tensor output_counts, "
    "Tensor repetition, Tensor presence, Tensor frequency",
)
def _apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    row_starts: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Compute `apply_penalties` of checked tensors in place."""
    penalties = Penalties(
        rows, row_starts, token_ids, output_counts, repetition, presence, frequency
    )
    capability = gpu_capability(logits)
    if capability is not None:
        from octavo_kernels._triton.apply_penalties import launch_apply_penalties

        launch_apply_penalties(logits, penalties, choose_penalties(capability))
        return
    library = library_for(logits)
    if library is None:
        logits.copy_(apply_penalties_reference(logits, penalties))
        return
    library.octavo_apply_penalties(
        logits.data_ptr(),
        rows.data_ptr(),
        row_starts.data_ptr(),
        token_ids.data_ptr(),
        output_counts.data_ptr(),
        repetition.data_ptr(),
        presence.data_ptr(),
        frequency.data_ptr(),
        *(len(rows), len(token_ids)),
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )
