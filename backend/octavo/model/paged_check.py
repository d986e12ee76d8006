"""Whether a model computes over paged KV what it computes by transformers' own attention.

One short text is computed whole, and in two chunks beside another, as a server would. Knows how a
step's inputs look, and nothing of architectures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.model.interface import CausalModel
from octavo_kernels import AttentionMetadata, KVCache

#: Tokens of the text that is computed in two chunks, of its first chunk, and of the one beside it.
_LONG, _CHUNK, _SHORT = 37, 21, 11
#: How far a row of logits may be from transformers' own, as a share of the largest of them: a few
#: roundings of the dtype a layer, over many layers.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
#: Share of rows that may be further away: where a router chooses among experts, one rounding may
#: choose another one.
_STRAY_ROWS = 0.125


class PagedCheck:
    """Compute the same texts by a model's own attention first, and over paged KV later.

    Args:
        model: of transformers, untouched; it is set to its eager attention.
        vocab_size: ids are below it.
        max_len: positions that the model has.
        device: of the model.
    """

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, max_len: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._texts = [
            torch.randint(vocab_size, (min(length, max_len),), generator=generator).to(device)
            for length in (_LONG, _SHORT)
        ]
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            self._own = torch.cat(
                [model(input_ids=text[None], use_cache=False).logits[0] for text in self._texts]
            ).float()

    def differs(self, paged: CausalModel[Any], tolerance: float) -> str | None:
        """Return how logits over paged KV are not the model's own, or None if they are."""
        logits = self._in_chunks(paged)
        if not bool(logits.isfinite().all()) and bool(self._own.isfinite().all()):
            return "its logits over paged KV are not finite, and its own are"
        scale = self._own.abs().amax(dim=1, keepdim=True)
        errors = ((logits - self._own) / scale).abs().amax(dim=1)
        share = float((errors > tolerance).float().mean())
        if share <= _STRAY_ROWS:
            return None
        return (
            f"over paged KV, {share:.0%} of its logits' rows differ from its own attention's by "
            f"more than {tolerance:g} of the largest, the worst by {float(errors.max()):.2g}"
        )

    def depends_on_rows(self, paged: CausalModel[Any]) -> bool:
        """Return whether a text has other bits alone than in chunks and beside another."""
        cache = _cache(paged)
        alone = torch.cat([_step(paged, cache, [(text, 0)], [0]) for text in self._texts])
        return not torch.equal(alone, self._in_chunks(paged))

    def _in_chunks(self, paged: CausalModel[Any]) -> torch.Tensor:
        long, short = self._texts
        cache, chunk = _cache(paged), min(_CHUNK, len(long))
        first = _step(paged, cache, [(long[:chunk], 0)], [0])
        if chunk == len(long):
            return torch.cat([first, _step(paged, cache, [(short, 0)], [1])])
        return torch.cat([first, _step(paged, cache, [(long[chunk:], chunk), (short, 0)], [0, 1])])


def _cache(paged: CausalModel[Any]) -> KVCache:
    return paged.attention.allocate(2 * _blocks(paged))


def _blocks(paged: CausalModel[Any]) -> int:
    """Return the blocks that each of the two texts is given."""
    return -(-_LONG // paged.attention.shape.block_size)


def _step(
    paged: CausalModel[Any],
    cache: KVCache,
    work: Sequence[tuple[torch.Tensor, int]],
    numbers: Sequence[int],
) -> torch.Tensor:
    """Compute tokens from a position on, of the texts of some numbers; return all their logits."""
    device, num_blocks = cache.storage.device, _blocks(paged)
    block_size = paged.attention.shape.block_size
    tables = torch.arange(2 * num_blocks, dtype=torch.int32).view(2, num_blocks)[list(numbers)]
    positions = [torch.arange(first, first + len(tokens)) for tokens, first in work]
    slots = [
        place + number * num_blocks * block_size
        for place, number in zip(positions, numbers, strict=True)
    ]
    lengths = [len(tokens) for tokens, _ in work]
    ends = [first + len(tokens) for tokens, first in work]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
    )
    token_ids = torch.cat([tokens for tokens, _ in work])
    rows = torch.arange(len(token_ids), device=device)
    return paged.forward(token_ids, torch.cat(positions).to(device), cache, metadata, rows)
