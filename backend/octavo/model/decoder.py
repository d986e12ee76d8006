"""The native decoder of the Llama family: a flat row of tokens in, logits of chosen rows out.

One step's tokens of all sequences lie behind each other in one row; positions, block tables and
lengths come with the metadata. It may be one part of a model, of a pipeline stage or of a tensor
group. Knows nothing of sequences, scheduling or sampling, nor where its weights came from; how the
KV cache is laid out is the attention backend's affair, and how ranks speak that of `Collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from octavo.model.collectives import ALONE, Collectives
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.spec import ModelSpec
from octavo.model.vocabulary import DividedVocabulary
from octavo_kernels import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    LayerParts,
    NativeLayers,
    SharedParts,
    add_rms_norm,
    make_native_layers,
    rms_norm,
    silu_and_mul,
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; norms are [size] tensors."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    """hidden -> queries, then keys, then values of all heads."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    """hidden -> gate, then up; packed as gated."""
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, in one dtype on one device."""

    embedding: Embedding | None
    """None past the first stage of a pipeline."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor | None
    lm_head: PackedLinear | None
    """None before the last stage, as the norm is."""
    cos_sin: torch.Tensor
    """[max_len, rotary_dim] float32, as `rotary_table` makes it."""


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
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: AttentionBackend,
        collectives: Collectives = ALONE,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.attention = attention
        self._collectives = collectives
        self._scale = spec.head_dim**-0.5
        is_whole = collectives.size == 1
        shared = SharedParts(
            eps=spec.rms_norm_eps,
            scale=self._scale,
            cos_sin=weights.cos_sin,
            sum_hidden_=None if is_whole else collectives.sum_,
        )
        self._native = _native_layers(spec.windows, weights.layers, attention, shared)
        self._vocabulary = None if is_whole else DividedVocabulary(spec.vocab_size, collectives)

    @property
    def max_len(self) -> int:
        """Number of positions the rotary table covers."""
        return self.weights.cos_sin.shape[0]

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
        """Compute one step and write its keys and values into `kv_cache`.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, each below `max_len`.
            kv_cache: mutated at `metadata.slot_mapping`.
            metadata: describes the same num_tokens tokens.
            logits_rows: [num_samples] int64, the rows whose logits are wanted; may be empty.
            out: receives the result.

        Returns:
            logits [num_samples, vocab_size] float32, `out` if given.
        """
        states = self.run(token_ids, positions, kv_cache, metadata)
        return self.project(states, logits_rows, out)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> States:
        """Do the same as `forward`, but for the logits: return what they are made of."""
        return self.run_layers(self.embed(token_ids), positions, kv_cache, metadata)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer begins with, [num_tokens, hidden]; of the first stage."""
        embedding = self.weights.embedding
        assert embedding is not None, "token ids are embedded in the first stage"
        if self._vocabulary is None:
            return embedding(token_ids)
        return self._vocabulary.embed(embedding, token_ids)

    @torch.inference_mode()
    def run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> States:
        """Run a stage's layers from its residual stream [num_tokens, hidden], which is mutated."""
        if self._native is not None and not is_compiling():
            return States(self._native(residual, positions, kv_cache, metadata), residual)
        return States(*self._run_layers(residual, positions, kv_cache, metadata))

    @torch.inference_mode()
    def project(
        self, states: States, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of some rows of a step, [rows, vocab_size] float32, `out` if given.

        It is the last stage's to do. All ranks of its tensor group take part; those but the first
        get no rows.

        Args:
            states: of the step.
            rows: [rows] int64; may be empty.
            out: receives the result.
        """
        hidden, residual = states
        if out is None:
            out = hidden.new_empty((len(rows), self.spec.vocab_size), dtype=torch.float32)
        if len(rows):
            weight, head = self.weights.final_norm, self.weights.lm_head
            assert weight is not None, "logits are made in the last stage"
            assert head is not None
            normed, _ = add_rms_norm(hidden[rows], residual[rows], weight, self.spec.rms_norm_eps)
            if self._vocabulary is not None:
                return self._vocabulary.gather(head(normed), out)
            head(normed, out=out)
        return out

    def _run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last layer's output, and the residual stream it is still to be added to."""
        weights, eps = self.weights, self.spec.rms_norm_eps
        hidden = rms_norm(residual, weights.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in weights.layers[1:]]
        for index, layer in enumerate(weights.layers):
            hidden = self._attend(index, hidden, positions, kv_cache, metadata)
            self._collectives.sum_(hidden)
            hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.down(silu_and_mul(layer.gate_up(hidden)))
            self._collectives.sum_(hidden)
            if index < len(next_norms):
                hidden, residual = add_rms_norm(hidden, residual, next_norms[index], eps)
        return hidden, residual

    def _attend(
        self,
        index: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the attention block's output, [num_tokens, hidden], of the part's heads."""
        spec, layer = self.spec, self.weights.layers[index]
        num_tokens = hidden.shape[0]
        heads = layer.qkv(hidden).view(num_tokens, -1, spec.head_dim)
        first_key, first_value = spec.num_heads, spec.num_heads + spec.num_kv_heads
        q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, spec.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        cos_sin, slots = self.weights.cos_sin, metadata.slot_mapping
        q = self.attention.rope_and_write_kv_cache(
            q, k, v, positions, cos_sin, kv_cache, index, slots, q_out=q
        )
        attended = self.attention.paged_attention(
            q, kv_cache, index, metadata, scale=self._scale, window=spec.windows[index]
        )
        return layer.o(attended.view(num_tokens, -1))


def _native_layers(
    windows: Sequence[int | None],
    layers: Sequence[LayerWeights],
    attention: AttentionBackend,
    shared: SharedParts,
) -> NativeLayers | None:
    """Return the layers as one native call, or None where they run operation by operation."""
    parts = []
    for layer, window in zip(layers, windows, strict=True):
        qkv, o = layer.qkv.native, layer.o.native
        gate_up, down = layer.gate_up.native, layer.down.native
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        parts.append(
            LayerParts(
                input_norm=layer.input_norm,
                qkv=qkv,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                o=o,
                mlp_norm=layer.mlp_norm,
                gate_up=gate_up,
                down=down,
                window=window,
            )
        )
    return make_native_layers(attention, shared, parts)
