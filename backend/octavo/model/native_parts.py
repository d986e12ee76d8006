"""The layers of a decoder as one native call, where that can do all that they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.model.blocks import GatedMlp
from octavo.model.collectives import Collectives
from octavo.model.layer_weights import LayerWeights
from octavo.model.norms import Norm, RmsNorm
from octavo.model.spec import ModelSpec
from octavo_kernels import (
    AttentionBackend,
    LayerParts,
    NativeLayers,
    SharedParts,
    make_native_layers,
)


def native_layers(
    spec: ModelSpec,
    layers: Sequence[LayerWeights],
    attention: AttentionBackend,
    collectives: Collectives,
) -> NativeLayers | None:
    """Return the layers as one native call, or None where they run operation by operation.

    Args:
        spec: of the part.
        layers: of the part.
        attention: owner of the cache.
        collectives: of the tensor group that shares the layers.
    """
    cos_sin = layers[0].attention.cos_sin
    parts = [_layer_parts(layer) for layer in layers]
    if (
        spec.residual_scale != 1.0
        or spec.is_parallel
        or cos_sin is None
        or any(layer.attention.cos_sin is not cos_sin for layer in layers)
    ):
        return None
    shared = SharedParts(
        eps=spec.norm.eps,
        scale=spec.attention_scale,
        cos_sin=cos_sin,
        sum_hidden_=None if collectives.size == 1 else collectives.sum_,
        exchange=collectives.exchange,
    )
    found = [part for part in parts if part is not None]
    return make_native_layers(attention, shared, found) if len(found) == len(parts) else None


def _layer_parts(layer: LayerWeights) -> LayerParts | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, GatedMlp) or mlp.activation != "silu":
        return None
    if layer.attention_norm is not None or layer.output_norm is not None:
        return None
    if attention.form.norms_all_heads:
        return None
    qkv, o = attention.qkv.native, attention.o.native
    gate_up, down = mlp.gate_up.native, mlp.down.native
    input_norm, mlp_norm = _weight(layer.input_norm), _weight(layer.mlp_norm)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    if input_norm is None or mlp_norm is None:
        return None
    return LayerParts(
        input_norm=input_norm,
        qkv=qkv,
        q_norm=_weight(attention.q_norm),
        k_norm=_weight(attention.k_norm),
        o=o,
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=down,
        window=attention.form.window,
        soft_cap=attention.form.score_cap,
    )


def _weight(norm: Norm | None) -> torch.Tensor | None:
    return norm.weight if isinstance(norm, RmsNorm) else None
