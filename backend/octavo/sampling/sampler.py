"""From logits to token ids, for a whole batch at once, without waiting for the device.

A row's token depends on its own logits, parameters, seed and position only, to the bit. Which rows
are random, masked or asked about is known on the host, so that what nobody asks for costs nothing.
Knows nothing of queues, finish reasons or text; how a token is drawn is octavo_kernels' to know.
"""

from __future__ import annotations

import torch

from octavo.sampling.batch import RandomRows, SamplingBatch
from octavo.sampling.device import HostCopy, to_device
from octavo.sampling.logprobs import KeptLogits, LogprobRows, read_logprobs
from octavo.sampling.processors import apply_processors
from octavo.scheduler.output import SampledToken
from octavo_kernels import SamplingRows, TopLogprobs, greedy
from octavo_kernels import sample as draw


class DrawnTokens:
    """What was drawn for each row; the copy to the host is under way.

    `logprobs` are those of the rows that `asked` names, on the device, too.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        asked: LogprobRows | None = None,
        logprobs: TopLogprobs | None = None,
    ) -> None:
        self.token_ids = token_ids
        """[rows] int64, on the device of the logits; -1 where nothing can be drawn."""
        self._asked = asked
        self._copy = HostCopy([token_ids, *(logprobs or ())])

    def tokens(self) -> tuple[SampledToken, ...]:
        """Wait for the copy, and return one token a row."""
        token_ids, *columns = self._copy.wait()
        if self._asked is None:
            return tuple(map(SampledToken, token_ids))
        logprobs = read_logprobs(self._asked.counts, columns)
        by_row = dict(zip(self._asked.rows.tolist(), logprobs, strict=True))
        return tuple(SampledToken(id_, by_row.get(row)) for row, id_ in enumerate(token_ids))


# The decoder's logits are inference tensors, which processors could not change otherwise.
@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> DrawnTokens:
    """Draw one token for each row; returns before the device has drawn it.

    Args:
        logits: [rows, vocab] float32; rows for which `batch` has processors are changed.
        batch: parameters of the same rows.

    Returns:
        One token a row, with log-probabilities for the rows of `batch.logprobs`: those of the
        model's own distribution, before processors, temperature and filters.
    """
    asked, processors = batch.logprobs, batch.processors
    kept = None if asked is None else KeptLogits(logits, asked, copy=processors is not None)
    if processors is not None:
        apply_processors(logits, processors)
    if batch.random is None:
        token_ids = greedy(logits)
    else:
        token_ids = draw(logits, _rows_on(logits.device, batch.random))
    return DrawnTokens(token_ids, asked, None if kept is None else kept.logprobs_of(token_ids))


def _rows_on(device: torch.device, random: RandomRows) -> SamplingRows:
    arrays = (random.temperature, random.top_k, random.top_p, random.min_p)
    return SamplingRows(*to_device([*arrays, random.seeds, random.positions], device))
