"""The layers of a decoder as one native call, where that can do all that they do."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.model.blocks import Attention, GatedMlp
from octavo.model.collectives import Collectives
from octavo.model.head_norms import AlikeHeadNorms, JointHeadNorms
from octavo.model.layer_weights import LayerWeights
from octavo.model.layers import PackedLinear
from octavo.model.lora import NO_LOW_RANKS, LowRanks
from octavo.model.norms import RmsNorm
from octavo.model.spec import ModelSpec
from octavo_kernels import (
    AttentionBackend,
    LayerLowRanks,
    LayerParts,
    LowRankTable,
    NativeLayers,
    SharedParts,
    make_native_layers,
)

_STATE_NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")


def native_layers(
    spec: ModelSpec,
    layers: Sequence[LayerWeights],
    attention: AttentionBackend,
    collectives: Collectives,
    low_ranks: LowRanks = NO_LOW_RANKS,
) -> NativeLayers | None:
    """Return the layers as one native call, or None where they run operation by operation.

    Args:
        spec: of the part.
        layers: of the part.
        attention: owner of the cache.
        collectives: of the tensor group that shares the layers.
        low_ranks: what adapters add to the layers.
    """
    if spec.is_parallel:
        return None
    parts = [_layer_parts(layer, low_ranks) for layer in layers]
    shared = SharedParts(
        eps=spec.norm.eps,
        scale=spec.attention_scale,
        gelu=spec.activation == "gelu",
        norms_all_heads=spec.qk_norm == "all",
        residual_scale=spec.residual_scale,
        sum_hidden_=None if collectives.size == 1 else collectives.sum_,
        exchange=collectives.exchange,
    )
    found = [part for part in parts if part is not None]
    return make_native_layers(attention, shared, found) if len(found) == len(parts) else None


def _layer_parts(layer: LayerWeights, low_ranks: LowRanks) -> LayerParts | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, GatedMlp):
        return None
    qkv, o = attention.qkv.native, attention.o.native
    gate_up, down = mlp.gate_up.native, mlp.down.native
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    norms = {name: getattr(layer, name) for name in _STATE_NORMS}
    heads = attention.head_norms
    if isinstance(heads, AlikeHeadNorms | JointHeadNorms):
        norms |= {"q_norm": heads.q, "k_norm": heads.k}
    elif heads is not None:
        return None
    if any(norm is not None and not isinstance(norm, RmsNorm) for norm in norms.values()):
        return None
    return LayerParts(
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        **{name: None if norm is None else norm.weight for name, norm in norms.items()},
        cos_sin=attention.cos_sin,
        window=attention.form.window,
        soft_cap=attention.form.score_cap,
        low_ranks=_layer_low_ranks(attention, mlp, low_ranks),
    )


def _layer_low_ranks(attention: Attention, mlp: GatedMlp, low_ranks: LowRanks) -> LayerLowRanks:
    def table(linear: PackedLinear) -> LowRankTable | None:
        low_rank = low_ranks.get(linear)
        return None if low_rank is None else low_rank.table

    return LayerLowRanks(
        qkv=table(attention.qkv),
        o=table(attention.o),
        gate_up=table(mlp.gate_up),
        down=table(mlp.down),
    )
