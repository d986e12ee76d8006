"""From logits to token ids, for a whole batch at once, without waiting for the device.

A row's token depends on its own logits, parameters, seed and position only, to the bit. Which rows
are random, masked or asked about is known on the host, so that what nobody asks for costs nothing.
Knows nothing of queues, finish reasons or text; how a token is drawn is octavo_kernels' to know.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.sampling.batch import RandomRows, SamplingBatch
from octavo.sampling.device import HostCopy, to_device
from octavo.sampling.processors import apply_processors
from octavo.scheduler.output import SampledToken
from octavo_kernels import SamplingRows, greedy, token_logprobs
from octavo_kernels import sample as draw


class DrawnTokens:
    """What was drawn for each row; the copy to the host is under way.

    `logprobs` are those of `logprob_rows`, on the device, too.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        logprob_rows: tuple[int, ...] = (),
        logprobs: torch.Tensor | None = None,
    ) -> None:
        self.token_ids = token_ids
        """[rows] int64, on the device of the logits; -1 where nothing can be drawn."""
        self._logprob_rows = logprob_rows
        self._copy = HostCopy([token_ids] if logprobs is None else [token_ids, logprobs])

    def tokens(self) -> tuple[SampledToken, ...]:
        """Wait for the copy, and return one token a row."""
        token_ids, *logprobs = self._copy.wait()
        by_row = dict(zip(self._logprob_rows, logprobs[0], strict=True)) if logprobs else {}
        return tuple(SampledToken(id_, by_row.get(row)) for row, id_ in enumerate(token_ids))


# The decoder's logits are inference tensors, which processors could not change otherwise.
@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> DrawnTokens:
    """Draw one token for each row; returns before the device has drawn it.

    Args:
        logits: [rows, vocab] float32; rows for which `batch` has processors are changed.
        batch: parameters of the same rows.

    Returns:
        One token a row; `logprob` is that of the model's own distribution, before processors,
        temperature and filters, and set for `batch.logprob_rows` only.
    """
    untouched = logits
    if batch.processors is not None:
        untouched = logits.clone() if batch.logprob_rows else logits
        apply_processors(logits, batch.processors)
    if batch.random is None:
        token_ids = greedy(logits)
    else:
        token_ids = draw(logits, _rows_on(logits.device, batch.random))
    if not batch.logprob_rows:
        return DrawnTokens(token_ids)
    (rows,) = to_device([np.array(batch.logprob_rows, np.int64)], logits.device)
    logprobs = token_logprobs(untouched, rows, token_ids[rows])
    return DrawnTokens(token_ids, batch.logprob_rows, logprobs)


def _rows_on(device: torch.device, random: RandomRows) -> SamplingRows:
    arrays = (random.temperature, random.top_k, random.top_p, random.min_p)
    return SamplingRows(*to_device([*arrays, random.seeds, random.positions], device))
