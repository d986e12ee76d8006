"""The vocabulary where each rank of a tensor group holds some of its rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.model.collectives import Collectives
from octavo.model.layers import Embedding
from octavo.model.shard import divide


class DividedVocabulary:
    """Embed token ids and bring logits together; knows nothing of weights but their rows.

    Args:
        vocab_size: rows over all ranks.
        collectives: of a group that divides them as `ModelPart.tokens` says.
    """

    def __init__(self, vocab_size: int, collectives: Collectives) -> None:
        self._vocab_size = vocab_size
        self._collectives = collectives
        self._parts = divide(vocab_size, collectives.size)
        self._tokens = self._parts[collectives.rank]
        self._width = max(map(len, self._parts))

    def embed(self, embedding: Embedding, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [num_tokens, hidden] of token ids [num_tokens] int64.

        They have the bits of the whole one, for only one rank's term is not zero.

        Args:
            embedding: of this rank's rows.
            token_ids: of any rank's rows.
        """
        rows = token_ids - self._tokens.start
        is_elsewhere = (rows < 0) | (rows >= len(self._tokens))
        partial = embedding(rows.masked_fill(is_elsewhere, 0))
        partial.masked_fill_(is_elsewhere[:, None], 0)
        self._collectives.sum_(partial)
        return partial

    def gather(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Bring the logits of all ranks together; return `out` on rank 0, no rows elsewhere.

        Args:
            logits: [rows, rows of this rank's vocabulary].
            out: [rows, vocab_size], mutated on rank 0 alone.
        """
        # A group's tensors have one shape; what is added here is left out below.
        padded = F.pad(logits, (0, self._width - logits.shape[1]))
        parts = self._collectives.gather(padded)
        for tokens, part in zip(self._parts, parts, strict=False):
            out[:, tokens.start : tokens.stop] = part[:, : len(tokens)]
        return out[: len(out) if parts else 0]
