"""`ModelSpec`: every number the decoder needs, one description for all families.

A family is a set of these properties and nothing else: who computes asks for them, never for a
name. Knows nothing of configs, files, tensors or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.model.rope import RopeSpec

Activation = Literal["silu", "gelu"]
"""`gelu` is its approximation with tanh."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The normalisation that a model uses wherever it normalises a state."""

    kind: Literal["rms", "layer"]
    """By the root of the mean square; or by mean and variance, and then with a bias."""
    eps: float
    adds_one: bool = False
    """Weights are stored as what is to be added to one."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The mixtures of experts that stand for the MLPs of some layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalizes_weights: bool
    """The probabilities of a token's experts are made to add up to one."""
    layers: tuple[bool, ...]
    """Per layer: whether it has experts."""
    stored: Literal["mlp", "block_sparse_moe"] = "mlp"
    """What a checkpoint calls them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one decoder-only model.

    Of a layer, x being the residual stream, a and m attention and MLP, each norm only if it is
    there:

        one after the other      x += scale * norm(a(norm(x)));  x += scale * norm(m(norm(x)))
        side by side             x += a(norm(x)) + m(norm(x)), of one norm
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: NormSpec
    ropes: tuple[RopeSpec | None, ...]
    """Per layer: how queries and keys are rotated; None for not at all."""
    windows: tuple[int | None, ...]
    """Per layer: how many last tokens, its own included, a token attends to; None for all."""
    attention_scale: float
    """Factor of the scores."""
    tied_embeddings: bool
    """The vocabulary projection is the embedding table."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The dtype the config names, `bfloat16`, `float16` or `float32`."""
    activation: Activation = "silu"
    has_input_norms: bool = True
    """Attention and MLP read the normalised stream, else the stream."""
    has_output_norms: bool = False
    """What attention and MLP make is normalised before it is added to the stream."""
    is_parallel: bool = False
    """Attention and MLP read the same state, side by side."""
    qk_norm: Literal["head", "all", "own"] | None = None
    """Queries and keys are normalised before the rotation: each head, or all heads as one, by the
    root of the mean square; or each head by mean and variance, with a weight of its own."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    """A checkpoint holds q, k and v in one tensor, and gate and up in another."""
    score_cap: float | None = None
    """A score s becomes cap * tanh(s / cap)."""
    logit_cap: float | None = None
    """The same of logits."""
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """The scale is rounded to the model's dtype before embeddings are multiplied by it."""
    residual_scale: float = 1.0
    experts: ExpertSpec | None = None
    is_text_part: bool = False
    """The model reads images too: a checkpoint has more than this says, which is left out."""

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts in place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]
