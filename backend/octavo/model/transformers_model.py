"""A model of transformers over one flat row of tokens: its own modules, with our attention.

Rows are tokens of any number of sequences, so modules see one text of `num_tokens` tokens, each
with its position; what mixes tokens is attention alone, which reads the step's metadata. Knows
nothing of any architecture, nor how weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.paged_interface import PAGED, Step, StepSlot
from octavo_kernels import AttentionBackend, AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True)
class TransformersInfo:
    """What is known of a model of transformers; see `ModelInfo`."""

    architecture: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]


class TransformersModel:
    """Run a model of transformers over paged KV; see `CausalModel`.

    Its modules are run one after the other, some of which read on the host what the device holds,
    so no graph records a step.

    Args:
        model: with weights, for evaluation; changed so that it runs in this way alone.
        layers: name of its module that is everything before the vocabulary projection.
        spec: of the model.
        attention: made for its KV heads, dtype and device.
    """

    recordable = False

    def __init__(
        self,
        model: PreTrainedModel,
        layers: str,
        spec: TransformersInfo,
        attention: AttentionBackend,
    ) -> None:
        self.spec = spec
        self.attention = attention
        self._slot = StepSlot(attention, spec.windows)
        self._slot.give_to(model)
        model.set_attn_implementation(PAGED)
        self._layers = model.get_submodule(layers)
        self._head = model
        model.set_submodule(layers, _GivenStates())

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """Compute a step that no adapter changes; return normalised states [num_tokens, hidden]."""
        assert adapted is None, "adapters take the native decoder"
        with self._slot.holding(Step(kv_cache, metadata)):
            output = self._layers(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        states: torch.Tensor = output[0][0]
        return states

    @torch.inference_mode()
    def project(
        self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of some rows of a step; see `CausalModel`."""
        if out is None:
            out = states.new_empty((len(rows), self.spec.vocab_size), dtype=torch.float32)
        if len(rows):
            given = states[rows].unsqueeze(0)
            out.copy_(self._head(inputs_embeds=given, use_cache=False)[0][0])
        return out

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logits_rows: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a step and project the given rows of it; see `CausalModel`."""
        states = self.run(token_ids, positions, kv_cache, metadata)
        return self.project(states, logits_rows, out)


class _LayersOutput(tuple[torch.Tensor]):
    """What a model's layers return: states, and nothing else that an architecture may ask for."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> torch.Tensor:
        """Their states, [1, rows, hidden]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _GivenStates(torch.nn.Module):
    """Stands where a model has its layers: what it is given is what they would return."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _LayersOutput:
        return _LayersOutput((inputs_embeds,))
