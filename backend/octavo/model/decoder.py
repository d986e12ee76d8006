"""The native decoder of all families: a flat row of tokens in, logits of chosen rows out.

One step's tokens of all sequences lie behind each other in one row; positions, block tables and
lengths come with the metadata. It may be one part of a model, of a pipeline stage or of a tensor
group. Knows nothing of sequences, scheduling or sampling, nor where its weights came from; how the
KV cache is laid out is the attention backend's affair, and how ranks speak that of `Collectives`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.blocks import StepInputs
from octavo.model.collectives import ALONE, Collectives
from octavo.model.layer_weights import DecoderWeights, LayerWeights
from octavo.model.lora import NO_LOW_RANKS, LowRanks, StepAdapters
from octavo.model.native_parts import native_layers
from octavo.model.norms import Norm
from octavo.model.spec import ModelSpec
from octavo.model.vocabulary import DividedVocabulary
from octavo_kernels import AttentionBackend, AttentionMetadata, KVCache


class States(NamedTuple):
    """What the layers make of a step's tokens; both are [num_tokens, hidden]."""

    hidden: torch.Tensor
    """The last layer's output."""
    residual: torch.Tensor
    """The residual stream that it is still to be added to."""

    def total(self) -> torch.Tensor:
        """Return the residual stream that the next stage of a pipeline begins with."""
        return self.hidden + self.residual


class Decoder:
    """Run a model, or one part of it, over one flat row of tokens.

    A token's logits depend, to the bit, on its own sequence's tokens and positions alone.

    Args:
        spec: of the part.
        weights: of the part.
        attention: made for the spec's KV heads and the weights' dtype and device.
        collectives: of the tensor group that shares the layers.
        low_ranks: what adapters add to the layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: AttentionBackend,
        collectives: Collectives = ALONE,
        low_ranks: LowRanks = NO_LOW_RANKS,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.attention = attention
        self._collectives = collectives
        self._low_ranks = low_ranks
        self._embedding_scale = _embedding_scale(spec, weights)
        is_whole = collectives.size == 1
        self._native = native_layers(spec, weights.layers, attention, collectives, low_ranks)
        self._vocabulary = None if is_whole else DividedVocabulary(spec.vocab_size, collectives)

    @property
    def recordable(self) -> bool:
        """Whether a graph can record a step; see `CausalModel`."""
        return self.attention.recordable

    @property
    def max_len(self) -> int:
        """Number of positions the rotary tables cover."""
        return self.weights.max_len

    @torch.inference_mode()
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

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedRows | None = None,
    ) -> States:
        """Compute a step of a model that is whole; see `CausalModel`."""
        return self.run_layers(self.embed(token_ids), positions, kv_cache, metadata, adapted)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer begins with, [num_tokens, hidden]; of the first stage."""
        embedding = self.weights.embedding
        assert embedding is not None, "token ids are embedded in the first stage"
        if self._vocabulary is None:
            embedded = embedding(token_ids)
        else:
            embedded = self._vocabulary.embed(embedding, token_ids)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    @torch.inference_mode()
    def run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedRows | None = None,
    ) -> States:
        """Run a stage's layers from its residual stream [num_tokens, hidden], which is mutated."""
        if self._native is not None and not is_compiling():
            own = None if adapted is None else (adapted.rows, adapted.starts)
            return States(self._native(residual, positions, kv_cache, metadata, own), residual)
        adapters = None if adapted is None else StepAdapters(self._low_ranks, adapted)
        sum_ = self._collectives.sum_
        step = StepInputs(positions, kv_cache, metadata, sum_, adapters)
        return self._run_layers(residual, step)

    @torch.inference_mode()
    def project(
        self, states: States, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of some rows of a step; see `CausalModel`.

        It is the last stage's to do. All ranks of its tensor group take part; those but the first
        get no rows.
        """
        hidden, residual = states
        if out is None:
            out = hidden.new_empty((len(rows), self.spec.vocab_size), dtype=torch.float32)
        if len(rows):
            norm, head = self.weights.final_norm, self.weights.lm_head
            assert norm is not None, "logits are made in the last stage"
            assert head is not None
            normed, _ = norm.add(hidden[rows], residual[rows])
            if self._vocabulary is None:
                head(normed, out=out)
            else:
                out = self._vocabulary.gather(head(normed), out)
            self._finish_logits_(out)
        return out

    def _run_layers(self, residual: torch.Tensor, step: StepInputs) -> States:
        hidden = None
        for index, layer in enumerate(self.weights.layers):
            hidden, residual = self._run_layer(index, layer, hidden, residual, step)
        assert hidden is not None, "a part has a layer"
        return States(hidden, residual)

    def _run_layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        step: StepInputs,
    ) -> States:
        """Run one layer after what the one before made, which is still to be added."""
        normed, residual = _advance(hidden, residual, layer.input_norm)
        attended = layer.attention(normed, step, self.attention, index)
        attended = self._finish(attended, layer.attention_norm)
        read, residual = _advance(attended, residual, layer.mlp_norm)
        made = layer.mlp(normed if self.spec.is_parallel else read, step)
        return States(self._finish(made, layer.output_norm), residual)

    def _finish(self, made: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Return what is to be added to the stream of what a block made; mutates it."""
        self._collectives.sum_(made)
        if norm is not None:
            norm(made, out=made)
        return made if self.spec.residual_scale == 1.0 else made.mul_(self.spec.residual_scale)

    def _finish_logits_(self, logits: torch.Tensor) -> None:
        """Do to logits what is left of the model; mutates them."""
        if self.spec.logit_divisor != 1.0:
            logits.div_(self.spec.logit_divisor)
        cap = self.spec.logit_cap
        if cap is not None:
            # What torch's tanh makes of a number does not depend on where it lies; measured.
            logits.div_(cap).tanh_().mul_(cap)


def _embedding_scale(spec: ModelSpec, weights: DecoderWeights) -> float:
    if weights.embedding is None or not spec.rounds_embedding_scale:
        return spec.embedding_scale
    return torch.tensor(spec.embedding_scale).to(weights.embedding.dtype).item()


def _advance(
    hidden: torch.Tensor | None, residual: torch.Tensor, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what the last block made, if there was one; return what the next reads, and the stream.

    It reads the stream itself where there is no norm.
    """
    if hidden is None:
        return residual if norm is None else norm(residual), residual
    if norm is not None:
        return norm.add(hidden, residual)
    residual = hidden + residual
    return residual, residual
