"""From the tensors of a checkpoint to the weights of a decoder, whole or one rank's part.

Reads each tensor once, and of a part no more than it holds: converted, fused with its neighbours,
packed, released. Knows what a checkpoint of the Llama family holds, and nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from octavo.model.checkpoint import Checkpoint
from octavo.model.decoder import DecoderWeights, LayerWeights
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.rope import rotary_table
from octavo.model.shard import ModelPart
from octavo.model.spec import ModelSpec

_EMBEDDING = "model.embed_tokens.weight"
_ALL = slice(None)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a checkpoint of this spec has."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes


class WeightReader:
    """Read a checked checkpoint into decoder weights of one dtype on one device.

    Args:
        checkpoint: of the whole model.
        part: what to read of it.
        dtype: of the weights.
        device: of the weights.
        make_linear: PackedLinear, or what makes one of the same arguments.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: ModelPart,
        dtype: torch.dtype,
        device: torch.device,
        make_linear: Callable[..., PackedLinear],
    ) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self._dtype = dtype
        self._device = device
        self._make_linear = make_linear
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def read(self, max_len: int) -> DecoderWeights:
        """Return the weights, for `max_len` positions."""
        part = self._part
        embedding, lm_head = self._vocabulary()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in part.layers),
            final_norm=self._norm("model.norm") if part.shard.is_last_stage else None,
            lm_head=lm_head,
            cos_sin=rotary_table(part.spec.rope, max_len).to(self._device),
        )

    def _vocabulary(self) -> tuple[Embedding | None, PackedLinear | None]:
        """Return what the first stage has of the vocabulary, and what the last one has."""
        tokens = _span(self._part.tokens)
        is_first, is_last = self._part.shard.is_first_stage, self._part.shard.is_last_stage
        if not self._part.spec.tied_embeddings:
            embedding = Embedding(self._tensor({_EMBEDDING: tokens})) if is_first else None
            return embedding, self._linear({"lm_head": tokens}, False) if is_last else None
        if not is_first and not is_last:
            return None, None
        weight = self._tensor({_EMBEDDING: tokens})
        lm_head = self._make_linear(weight) if is_last else None
        return Embedding(weight, lm_head) if is_first else None, lm_head

    def _layer(self, index: int) -> LayerWeights:
        part, spec, prefix = self._part, self._part.spec, f"model.layers.{index}."
        q, kv = _span(part.heads, spec.head_dim), _span(part.kv_heads, spec.head_dim)
        inner = _span(part.inner)
        # One rank adds the bias of a product that is summed over ranks.
        adds_bias = part.shard.tp_rank == 0
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}q_proj": q, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        o, down = {f"{attention}o_proj": _ALL}, {f"{mlp}down_proj": _ALL}
        return LayerWeights(
            input_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=self._linear(qkv, spec.qkv_bias),
            q_norm=self._norm(f"{attention}q_norm") if spec.qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm") if spec.qk_norm else None,
            o=self._linear(o, spec.o_bias and adds_bias, columns=q),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up=self._linear(gate_up, spec.mlp_bias, is_gated=True),
            down=self._linear(down, spec.mlp_bias and adds_bias, columns=inner),
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self._tensor({f"{name}.weight": _ALL})

    def _linear(
        self,
        rows: Mapping[str, slice],
        has_bias: bool,
        *,
        columns: slice = _ALL,
        is_gated: bool = False,
    ) -> PackedLinear:
        """Return linears joined along their outputs, `rows` of each, over the same inputs."""
        weights = {f"{name}.weight": part for name, part in rows.items()}
        biases = {f"{name}.bias": part for name, part in rows.items()}
        bias = self._tensor(biases) if has_bias else None
        parts = self._parts(weights, columns)
        weight = _join(parts, self._scratch_for(_joined_shape(parts)))
        linear = self._make_linear(weight, bias, is_gated=is_gated)
        if linear.keeps_weight:
            self._scratch = self._scratch.new_empty(0)
        return linear

    def _scratch_for(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory for a weight that is to be packed, the same for one after the other.

        What is allocated for each and freed again would leave holes between the packed ones.
        """
        size = math.prod(shape)
        if len(self._scratch) < size:
            self._scratch = self._scratch.new_empty(size)
        return self._scratch[:size].view(shape)

    def _tensor(self, rows: Mapping[str, slice]) -> torch.Tensor:
        """Return parts of tensors joined along their rows, in memory of their own."""
        parts = self._parts(rows)
        shape = _joined_shape(parts)
        return _join(parts, torch.empty(shape, dtype=self._dtype, device=self._device))

    def _parts(self, rows: Mapping[str, slice], *columns: slice) -> list[torch.Tensor]:
        return [self._checkpoint.tensor(name, part, *columns) for name, part in rows.items()]


def _joined_shape(parts: list[torch.Tensor]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _join(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write tensors into `out`, joined along their rows, and return it."""
    start = 0
    for part in parts:
        out[start : start + part.shape[0]] = part
        start += part.shape[0]
    return out


def _span(part: range, unit: int = 1) -> slice:
    """Return the rows or columns of a range of things of `unit` rows or columns each."""
    return slice(part.start * unit, part.stop * unit)
