"""The two blocks of a layer, of one rank's part of it: attention over paged KV, and the MLP.

What they return is the rank's term of a sum over the tensor group. They know nothing of norms
around them, of the residual stream or of other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.model.head_norms import HeadNorms, Sum
from octavo.model.layers import PackedLinear
from octavo.model.lora import StepAdapters
from octavo.model.spec import Activation
from octavo_kernels import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    gelu_and_mul,
    silu_and_mul,
)

_GATED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers are told of one step's tokens."""

    positions: torch.Tensor
    """[num_tokens] int64."""
    kv_cache: KVCache
    """Mutated at `metadata.slot_mapping`."""
    metadata: AttentionMetadata
    """Describes the same tokens."""
    sum_: Sum
    """Over the ranks that share the layers."""
    adapters: StepAdapters | None = None
    """What is added to products of some of them, if anything."""

    def multiply(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return a layer's product of x [num_tokens, in], with what adapters add to it."""
        product = linear(x)
        if self.adapters is not None:
            self.adapters.add_(product, linear, x)
        return product


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The numbers of one layer's attention; heads are those of the part."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores."""
    score_cap: float | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Attend from each token to its own sequence's KV, which it writes first."""

    form: AttentionForm
    qkv: PackedLinear
    """hidden -> queries, then keys, then values of all heads."""
    head_norms: HeadNorms | None
    cos_sin: torch.Tensor | None
    """[max_len, rotary_dim] float32, as `rotary_table` makes it; None for no rotation."""
    o: PackedLinear

    def __call__(
        self, hidden: torch.Tensor, step: StepInputs, backend: AttentionBackend, layer: int
    ) -> torch.Tensor:
        """Return what the part's heads add to the stream, [num_tokens, hidden].

        Args:
            hidden: [num_tokens, hidden].
            step: mutates its cache.
            backend: owner of the cache.
            layer: index in the cache.
        """
        form, num_tokens = self.form, hidden.shape[0]
        heads = step.multiply(self.qkv, hidden).view(num_tokens, -1, form.head_dim)
        first_value = form.num_heads + form.num_kv_heads
        q, k = heads[:, : form.num_heads], heads[:, form.num_heads : first_value]
        v = heads[:, first_value:]
        if self.head_norms is not None:
            q, k = self.head_norms(q, k, step.sum_)
        slots = step.metadata.slot_mapping
        if self.cos_sin is None:
            backend.write_kv_cache(k, v, step.kv_cache, layer, slots)
        else:
            q = backend.rope_and_write_kv_cache(
                *(q, k, v, step.positions, self.cos_sin, step.kv_cache, layer, slots), q_out=q
            )
        attended = backend.paged_attention(
            *(q, step.kv_cache, layer, step.metadata),
            scale=form.scale,
            window=form.window,
            soft_cap=form.score_cap,
        )
        return step.multiply(self.o, attended.view(num_tokens, -1))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Two products with a gated activation between them."""

    activation: Activation
    gate_up: PackedLinear
    """hidden -> gate, then up; packed as gated."""
    down: PackedLinear

    def __call__(self, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what the part's inner columns add to the stream, [num_tokens, hidden]."""
        active = _GATED[self.activation](step.multiply(self.gate_up, hidden))
        return step.multiply(self.down, active)
