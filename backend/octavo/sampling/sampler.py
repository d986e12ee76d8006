"""From logits to token ids, for a whole batch at once.

A row's token depends on its own logits, parameters, seed and position only, to the bit: reductions
run along the row in a fixed order, and whether a row takes the short or the long way is decided by
the row itself. Greedy rows are never sorted. Knows nothing of queues, finish reasons or text.

Order of filters as in transformers: temperature, top-k (ties with the k-th kept), top-p over what
top-k left, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.sampling.batch import RandomRows, SamplingBatch
from octavo.sampling.random import uniform
from octavo.scheduler.output import SampledToken

#: Most filtered rows keep fewer tokens than this, so that a partial sort is exact for them.
PREFILTER = 256


class DrawnTokens:
    """What was drawn for each row, on the device until it is asked for."""

    def __init__(self, token_ids: torch.Tensor, logprobs: list[float | None]) -> None:
        self.token_ids = token_ids
        """[rows] int64, on the device of the logits."""
        self._logprobs = logprobs

    def tokens(self) -> tuple[SampledToken, ...]:
        """Wait for the device, and return one token a row."""
        return tuple(map(SampledToken, self.token_ids.tolist(), self._logprobs))


# The decoder's logits are inference tensors, which masking could not change otherwise.
@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> DrawnTokens:
    """Draw one token for each row.

    Args:
        logits: [rows, vocab] float32; ids masked by `batch` are overwritten with -inf.
        batch: parameters of the same rows.

    Returns:
        One token a row; `logprob` is that of the model's own distribution, before temperature,
        filters and masks, and set for `batch.logprob_rows` only.
    """
    logprob_rows = torch.tensor(batch.logprob_rows, dtype=torch.int64, device=logits.device)
    asked = logits[logprob_rows].log_softmax(dim=-1) if batch.logprob_rows else None
    vocab = logits.shape[-1]
    for row, ids in batch.masked_ids:
        # A request may name stop ids that this model does not have.
        logits[row, [token_id for token_id in ids if token_id < vocab]] = -torch.inf
    token_ids = logits.argmax(dim=-1)
    if batch.random is not None:
        rows = torch.from_numpy(batch.random.rows).to(logits.device)
        token_ids[rows] = _draw(logits[rows], batch.random)
    logprobs: list[float | None] = [None] * batch.num_rows
    if asked is not None:
        drawn = asked.gather(1, token_ids[logprob_rows, None])[:, 0].tolist()
        for row, value in zip(batch.logprob_rows, drawn, strict=True):
            logprobs[row] = value
    return DrawnTokens(token_ids, logprobs)


def _draw(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Return [rows] int64 token ids drawn from `logits` [rows, vocab] float32."""
    device = logits.device
    temperature = torch.from_numpy(random.temperature).to(device)
    # A softmax of logits divided by almost nothing overflows; the best token is then certain.
    probs = (logits / temperature.clamp(min=1e-5)[:, None]).softmax(dim=-1)
    noise = torch.from_numpy(uniform(random.seeds, random.positions)).to(device)
    plain = torch.from_numpy((random.top_k == 0) & (random.top_p >= 1.0) & (random.min_p == 0.0))
    token_ids = torch.empty(len(noise), dtype=torch.int64, device=device)
    plain_rows = plain.nonzero()[:, 0].to(device)
    filtered_rows = (~plain).nonzero()[:, 0].to(device)
    if len(plain_rows):
        token_ids[plain_rows] = _pick(probs[plain_rows], noise[plain_rows])
    if len(filtered_rows):
        filters = Filters.of(random, device)
        token_ids[filtered_rows] = _draw_filtered(
            probs[filtered_rows], filters.select(filtered_rows), noise[filtered_rows]
        )
    return token_ids


@dataclass(frozen=True, slots=True)
class Filters:
    """Per-row filters, each a tensor [rows, 1]; a `top_k` of 0 keeps all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, random: RandomRows, device: torch.device) -> Filters:
        """Copy the parameters of `random` to `device`."""
        arrays = (random.top_k, random.top_p, random.min_p)
        return cls(*(torch.from_numpy(array)[:, None].to(device) for array in arrays))

    def select(self, rows: torch.Tensor) -> Filters:
        """Return the parameters of some rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _draw_filtered(probs: torch.Tensor, filters: Filters, noise: torch.Tensor) -> torch.Tensor:
    """Draw by a partial sort, and again by a whole one where the partial sort cut too much off."""
    vocab = probs.shape[-1]
    best, ids = probs.topk(min(PREFILTER, vocab), dim=-1, sorted=True)
    weights, fits = _filter(best, filters, whole=best.shape[-1] == vocab)
    token_ids = ids.gather(1, _pick(weights, noise)[:, None])[:, 0]
    rest = (~fits).nonzero()[:, 0]
    if len(rest):
        best, ids = probs[rest].sort(dim=-1, descending=True, stable=True)
        weights, _ = _filter(best, filters.select(rest), whole=True)
        token_ids[rest] = ids.gather(1, _pick(weights, noise[rest])[:, None])[:, 0]
    return token_ids


def _filter(
    best: torch.Tensor, filters: Filters, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the probabilities that the filters drop.

    Args:
        best: [rows, kept] float32, the largest probabilities in falling order.
        filters: parameters of the same rows.
        whole: whether nothing was cut off behind `best`.

    Returns:
        Weights [rows, kept], and [rows] bool: whether all that the filters keep is in `best`.
    """
    kept = best.shape[-1]
    has_top_k = filters.top_k > 0
    last_rank = (filters.top_k - 1).clamp(0, kept - 1)
    floor = torch.where(has_top_k, best.gather(1, last_rank), -1.0)
    in_top_k = best >= floor
    inside = best * in_top_k
    mass = inside.cumsum(dim=-1)
    total_mass = torch.where(has_top_k, mass[:, -1:], 1.0)
    in_top_p = (mass - inside < filters.top_p * total_mass) | (filters.top_p >= 1.0)
    in_top_p[:, 0] = True  # a top_p that is 0 in float32 still keeps the best
    in_min_p = inside >= filters.min_p * inside[:, :1]
    fits = (
        (has_top_k & (filters.top_k < kept) & (best[:, -1:] < floor))
        | ((filters.top_p < 1.0) & ~has_top_k & (mass[:, -1:] >= filters.top_p))
        | ((~has_top_k | (filters.top_p >= 1.0)) & (best[:, -1:] < filters.min_p * best[:, :1]))
    )[:, 0]
    return inside * (in_top_p & in_min_p), fits | whole


def _pick(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return [rows] indices drawn in proportion to `weights` [rows, n], one uniform number each."""
    mass = weights.cumsum(dim=-1)
    target = noise[:, None] * mass[:, -1:]
    index = torch.searchsorted(mass, target, right=True)[:, 0]
    return index.clamp(max=weights.shape[-1] - 1)
