"""What all layers of a decoder are made of, as one native call takes them, and the check of it.

Knows nothing of embeddings, vocabularies or checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels.attention import KVCacheShape
from octavo_kernels.low_rank import LowRankTable
from octavo_kernels.packed_linear import PackedWeight
from octavo_kernels.shared_exchange import SharedExchange

_FLOAT32 = (torch.float32,)
_ANY_POSITION = 2**62  # none is too large where nothing is rotated
_STATE_NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")


@dataclass(frozen=True)
class LayerLowRanks:
    """What adapters add to a layer's products, None where none adds anything; of as many slots."""

    qkv: LowRankTable | None = None
    o: LowRankTable | None = None
    gate_up: LowRankTable | None = None
    down: LowRankTable | None = None

    def tables(self) -> tuple[LowRankTable | None, ...]:
        """Return all, in this order."""
        return self.qkv, self.o, self.gate_up, self.down


NO_LOW_RANKS = LayerLowRanks()


@dataclass(frozen=True)
class LayerParts:
    """One layer; norms are [size] float32, and None where there is none."""

    qkv: PackedWeight
    """hidden -> queries, then keys, then values of all heads."""
    o: PackedWeight
    gate_up: PackedWeight
    """hidden -> gate, then up; packed as gated."""
    down: PackedWeight
    input_norm: torch.Tensor | None = None
    """Of what attention reads."""
    attention_norm: torch.Tensor | None = None
    """Of what attention makes."""
    mlp_norm: torch.Tensor | None = None
    """Of what the MLP reads."""
    output_norm: torch.Tensor | None = None
    """Of what the MLP makes."""
    q_norm: torch.Tensor | None = None
    """[head_dim], or [q_heads * head_dim] of all heads; given if and only if `k_norm` is."""
    k_norm: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    """[max_len, rotary_dim] float32, as `apply_rope` takes it, of one shape in all layers; None for
    no rotation."""
    window: int | None = None
    """Positions that a row sees, its own included; None for all."""
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """[q_heads] float32, as AttentionBackend.paged_attention takes them."""
    low_ranks: LayerLowRanks = NO_LOW_RANKS


@dataclass(frozen=True)
class SharedParts:
    """What all layers have in common."""

    eps: float
    """Of all norms."""
    scale: float
    """Factor of the scores."""
    interleaved: bool = False
    gelu: bool = False
    """Whether the gated activation is gelu_and_mul, instead of silu_and_mul."""
    norms_all_heads: bool = False
    """Whether `q_norm` and `k_norm` take all heads as one row."""
    residual_scale: float = 1.0
    """Factor of what is added to the residual stream."""
    sum_hidden_: Callable[[torch.Tensor], None] | None = None
    """Adds to what `o` and `down` make, [num_tokens, hidden], what others make of the same layers,
    in place; None where there are no others."""
    exchange: SharedExchange | None = None
    """What `sum_hidden_` adds through, if that is all it does: it need not be called then."""


def check_parts(cache: KVCacheShape, shared: SharedParts, parts: Sequence[LayerParts]) -> None:
    """Raise ValueError unless every layer has the sizes of the first, and those fit the cache."""
    table = table_shape(parts)
    for layer in parts:
        _check_linears(cache, layer, parts[0])
        _check_factors(cache, shared, layer, parts[0])
        _check_low_ranks(layer, adapter_slots(parts))
        if layer.cos_sin is not None:
            check_tensor("native_layers: cos_sin", layer.cos_sin, table, dtypes=_FLOAT32, packed=2)


def table_shape(parts: Sequence[LayerParts]) -> tuple[int, int]:
    """Return the positions and the rotated entries that the layers' tables have."""
    for layer in parts:
        if layer.cos_sin is not None:
            return layer.cos_sin.shape[0], layer.cos_sin.shape[1]
    return _ANY_POSITION, 0


def adapter_slots(parts: Sequence[LayerParts]) -> int | None:
    """Return how many slots for adapters the layers have, None without a table of any."""
    tables = (table for layer in parts for table in layer.low_ranks.tables())
    return next((len(table.pointers) for table in tables if table is not None), None)


def _check_low_ranks(layer: LayerParts, num_slots: int | None) -> None:
    for name in ("qkv", "o", "gate_up", "down"):
        weight, table = getattr(layer, name), getattr(layer.low_ranks, name)
        if table is None:
            continue
        given = (*table.shape, table.is_gated, table.instructions, len(table.pointers))
        sizes = (weight.in_features, weight.out_features)
        wanted = (*sizes, weight.is_gated, weight.instructions, num_slots)
        if given != wanted:
            raise ValueError(
                f"native_layers: adapters of {name} have {given} but must have {wanted}: inputs, "
                "outputs, whether it is gated, instructions and slots"
            )


def _check_linears(cache: KVCacheShape, layer: LayerParts, first: LayerParts) -> None:
    hidden, inner, q_size = _sizes(first)
    kv_size = cache.num_kv_heads * cache.head_dim
    sizes = {
        "qkv": (layer.qkv, hidden, q_size + 2 * kv_size),
        "o": (layer.o, q_size, hidden),
        "gate_up": (layer.gate_up, hidden, 2 * inner),
        "down": (layer.down, inner, hidden),
    }
    for name, (weight, inputs, outputs) in sizes.items():
        given = (weight.in_features, weight.out_features, weight.dtype)
        if given != (inputs, outputs, cache.dtype):
            raise ValueError(
                f"native_layers: {name} is {given} but must be {(inputs, outputs, cache.dtype)}: "
                "inputs, outputs and dtype"
            )
    if not layer.gate_up.is_gated:
        raise ValueError("native_layers: gate_up must be packed as gated")


def _check_factors(
    cache: KVCacheShape, shared: SharedParts, layer: LayerParts, first: LayerParts
) -> None:
    hidden, _, q_size = _sizes(first)
    sizes = dict.fromkeys(_STATE_NORMS, hidden)
    sizes |= {"q_norm": cache.head_dim, "k_norm": cache.head_dim}
    if shared.norms_all_heads:
        sizes |= {"q_norm": q_size, "k_norm": cache.num_kv_heads * cache.head_dim}
    sizes["sinks"] = q_size // cache.head_dim
    for name, size in sizes.items():
        factors = getattr(layer, name)
        if factors is not None:
            check_tensor(f"native_layers: {name}", factors, (size,), dtypes=_FLOAT32)


def _sizes(layer: LayerParts) -> tuple[int, int, int]:
    """Return a layer's hidden size, inner columns and size of all queries."""
    return layer.qkv.in_features, layer.down.in_features, layer.o.in_features
