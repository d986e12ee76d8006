"""What those who run a model need of it, whichever way it is implemented.

The native decoder and the adapter of transformers' models both satisfy it. Knows nothing of either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.lora_reader import AdapterMemory
from octavo_kernels import AttentionBackend, AttentionMetadata, KVCache

StatesT = TypeVar("StatesT")


class ModelInfo(Protocol):
    """What is known of a model before it runs."""

    @property
    def architecture(self) -> str:
        """Name of the model's class in transformers."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer: how many last tokens, its own included, a token sees; None for all."""


class CausalModel(Protocol[StatesT]):
    """A model that runs over one flat row of tokens, whose KV lies in blocks.

    `StatesT` is what `run` makes and `project` reads; nobody else looks inside.
    """

    @property
    def spec(self) -> ModelInfo:
        """What is known of it."""

    @property
    def attention(self) -> AttentionBackend:
        """Owner of the KV cache's layout."""

    @property
    def recordable(self) -> bool:
        """Whether a graph can record a step: the host never reads what a GPU holds."""

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedRows | None = None,
    ) -> StatesT:
        """Compute one step, and write its keys and values into `kv_cache`.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, each below the positions that the model covers.
            kv_cache: mutated at `metadata.slot_mapping`.
            metadata: describes the same num_tokens tokens.
            adapted: rows that adapters change; None for none.
        """

    def project(
        self, states: StatesT, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of some rows of a step, [rows, vocab_size] float32, `out` if given.

        Args:
            states: of the step.
            rows: [rows] int64; may be empty.
            out: receives the result.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logits_rows: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a step that no adapter changes, and project `logits_rows` of it; see both."""


class ServedModel(Protocol):
    """A loaded model, and what those around it need to know."""

    @property
    def spec(self) -> ModelInfo:
        """What is known of the whole model."""

    @property
    def decoder(self) -> CausalModel[Any]:
        """What computes."""

    @property
    def attention(self) -> AttentionBackend:
        """Owner of the KV cache's layout."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, states and KV."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def directory(self) -> Path:
        """The checkpoint; its tokenizer is there too."""

    @property
    def max_model_len(self) -> int:
        """Positions it covers, in tokens."""

    @property
    def adapters(self) -> AdapterMemory:
        """What may be added to it, and what of that is in memory."""
