"""The weights of a decoder, put together as it uses them. Knows nothing of where they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.model.blocks import Attention, StepInputs
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.norms import Norm

Mlp = Callable[[torch.Tensor, StepInputs], torch.Tensor]
"""[num_tokens, hidden] of a step -> a rank's term of what it adds to the stream, likewise."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: its blocks and the norms around them, each None where there is none."""

    input_norm: Norm | None
    """Of what attention reads."""
    attention: Attention
    attention_norm: Norm | None
    """Of what attention makes, summed over ranks."""
    mlp_norm: Norm | None
    """Of what the MLP reads."""
    mlp: Mlp
    output_norm: Norm | None
    """Of what the MLP makes, summed over ranks."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, in one dtype on one device."""

    embedding: Embedding | None
    """None past the first stage of a pipeline."""
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    lm_head: PackedLinear | None
    """None before the last stage, as the norm is."""
    max_len: int
    """Positions that the rotary tables cover."""
