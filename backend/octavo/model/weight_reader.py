"""From the tensors of a checkpoint to the weights of a decoder, whole or one rank's part.

Reads each tensor once, and of a part no more than it holds: converted, fused with its neighbours,
packed, released. What tensors are called is `tensor_names`' affair; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from octavo.model import tensor_names as names
from octavo.model.blocks import Attention, AttentionForm, GatedMlp
from octavo.model.expert_names import expert_names
from octavo.model.experts import Experts
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.head_norms import (
    AlikeHeadNorms,
    DividedHeadNorms,
    HeadNorms,
    JointHeadNorms,
    OwnHeadNorms,
)
from octavo.model.layer_weights import DecoderWeights, LayerWeights, Mlp
from octavo.model.layers import Embedding, PackedLinear
from octavo.model.load_progress import logged
from octavo.model.norms import LayerNorm, Norm, RmsNorm
from octavo.model.rope import RopeSpec, rotary_table
from octavo.model.scratch import Scratch
from octavo.model.shard import ModelPart
from octavo.model.spec import ExpertSpec
from octavo.model.tensor_names import ALL, Rows


class TensorSource(Protocol):
    """Where tensors are read from; a Checkpoint is one."""

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of a name."""
        ...

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        """Return a tensor, of each dimension from the first what is wanted."""
        ...


class WeightReader:
    """Read a checked checkpoint into decoder weights of one dtype on one device.

    Args:
        checkpoint: of the whole model.
        part: what to read of it.
        dtype: of the weights.
        device: of the weights.
        make_linear: PackedLinear, or what makes one of the same arguments.
        make_grouped: GroupedLinear, or what makes one of the same arguments.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        part: ModelPart,
        dtype: torch.dtype,
        device: torch.device,
        make_linear: Callable[..., PackedLinear],
        make_grouped: Callable[..., GroupedLinear],
    ) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self._dtype = dtype
        self._device = device
        self._make_linear = make_linear
        self._make_grouped = make_grouped
        self._scratch = Scratch(dtype, device)
        self.num_bytes = 0
        """What the weights that are read take, but for the padding of packed ones."""

    def read(self, max_len: int) -> DecoderWeights:
        """Return the weights, for `max_len` positions."""
        part = self._part
        embedding, lm_head = self._vocabulary()
        tables = {rope: self._table(rope, max_len) for rope in set(part.spec.ropes)}
        count = len(part.layers)
        indices = logged(range(count), count, "layers")
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(index, tables) for index in indices),
            final_norm=self._norm(names.FINAL_NORM) if part.shard.is_last_stage else None,
            lm_head=lm_head,
            max_len=max_len,
        )

    def _table(self, rope: RopeSpec | None, max_len: int) -> torch.Tensor | None:
        return None if rope is None else rotary_table(rope, max_len).to(self._device)

    def _vocabulary(self) -> tuple[Embedding | None, PackedLinear | None]:
        """Return what the first stage has of the vocabulary, and what the last one has."""
        tokens = names.span(self._part.tokens)
        is_first, is_last = self._part.shard.is_first_stage, self._part.shard.is_last_stage
        if not self._part.spec.tied_embeddings:
            embedding = self._tensor([(names.EMBEDDING, tokens)]) if is_first else None
            lm_head = self._linear([(names.LM_HEAD, tokens)], False) if is_last else None
            self.num_bytes += 0 if embedding is None else embedding.nbytes
            return None if embedding is None else Embedding(embedding), lm_head
        if not is_first and not is_last:
            return None, None
        weight = self._tensor([(names.EMBEDDING, tokens)])
        lm_head = self._make_linear(weight) if is_last else None
        self.num_bytes += weight.nbytes if is_first else 0
        # One weight serves both unless the projection has a copy of fewer bits.
        if lm_head is not None and (lm_head.is_quantized or not is_first):
            self.num_bytes += lm_head.num_bytes
        return Embedding(weight, lm_head) if is_first else None, lm_head

    def _layer(
        self, index: int, tables: dict[RopeSpec | None, torch.Tensor | None]
    ) -> LayerWeights:
        """Return layer `index` of the part."""
        prefix = names.layer_prefix(self._part.layers[index])
        norms = names.layer_norms(self._part.spec)
        input_norm, attention_norm, mlp_norm, output_norm = (
            None if name is None else self._norm(f"{prefix}{name}") for name in norms
        )
        spec = self._part.spec
        part_experts = spec.experts if spec.has_experts(index) else None
        cos_sin = tables[spec.ropes[index]]
        return LayerWeights(
            input_norm=input_norm,
            attention=self._attention(index, prefix, cos_sin),
            attention_norm=attention_norm,
            mlp_norm=mlp_norm,
            mlp=self._mlp(prefix) if part_experts is None else self._experts(prefix, part_experts),
            output_norm=output_norm,
        )

    def _attention(self, index: int, prefix: str, cos_sin: torch.Tensor | None) -> Attention:
        part, spec = self._part, self._part.spec
        form = AttentionForm(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            score_cap=spec.score_cap,
            window=spec.windows[index],
        )
        heads = names.span(part.heads, spec.head_dim)
        return Attention(
            form=form,
            qkv=self._linear(names.qkv_rows(part, prefix), spec.qkv_bias),
            head_norms=self._head_norms(prefix),
            cos_sin=cos_sin,
            o=self._linear(
                [(f"{prefix}{names.OUT}", ALL)], spec.o_bias and self._adds_bias, columns=heads
            ),
        )

    def _head_norms(self, prefix: str) -> HeadNorms | None:
        part, spec = self._part, self._part.spec
        if spec.qk_norm is None:
            return None
        q, k = (self._factors(rows) for rows in names.head_norm_rows(part, prefix))
        head_dim, eps = spec.head_dim, spec.norm.eps
        if spec.qk_norm == "own":
            plain = LayerNorm(q.new_ones(head_dim), q.new_zeros(head_dim), eps)
            return OwnHeadNorms(plain, q.view(-1, head_dim), k.view(-1, head_dim))
        if spec.qk_norm == "head":
            return AlikeHeadNorms(RmsNorm(q, eps), RmsNorm(k, eps))
        if part.shard.tp_size == 1:
            return JointHeadNorms(RmsNorm(q, eps), RmsNorm(k, eps))
        sizes = torch.tensor([part.whole.num_heads, part.whole.num_kv_heads]) * float(head_dim)
        return DividedHeadNorms(
            q_weight=q.view(-1, head_dim),
            k_weight=k.view(-1, head_dim),
            eps=eps,
            sizes=sizes.to(self._device),
            counts_keys=part.adds_keys,
        )

    def _mlp(self, prefix: str) -> GatedMlp:
        part, spec = self._part, self._part.spec
        rows = names.gate_up_rows(part, prefix)
        down = [(f"{prefix}{names.DOWN}", ALL)]
        return GatedMlp(
            activation=spec.activation,
            gate_up=self._linear(rows, spec.mlp_bias, is_gated=True),
            down=self._linear(
                down, spec.mlp_bias and self._adds_bias, columns=names.span(part.inner)
            ),
        )

    def _experts(self, prefix: str, spec: ExpertSpec) -> Mlp:
        stored = expert_names(spec)
        hidden, inner = self._part.spec.hidden_size, spec.intermediate_size
        shapes = (spec.num_experts, 2 * inner, hidden), (spec.num_experts, hidden, inner)
        gate_up, down = (
            self._make_grouped(shape, self._dtype, self._device, is_gated=is_gated)
            for shape, is_gated in zip(shapes, (True, False), strict=True)
        )
        columns = names.span(self._part.expert_inner)
        for index in range(spec.num_experts):
            gates, ups, downs = (f"{prefix}{name}.weight" for name in stored.of(index))
            gate_up.fill(index, self._scratched([(gates, columns), (ups, columns)]))
            down.fill(index, self._scratched([(downs, ALL)], columns))
        # Not quantised: it decides who computes.
        router = self._tensor([(f"{prefix}{stored.router}.weight", ALL)])
        experts = Experts(spec, self._make_linear(router, stored_as=None), gate_up, down)
        # No adapter changes experts.
        self.num_bytes += gate_up.num_bytes + down.num_bytes + router.nbytes
        return lambda hidden, step: experts(hidden)

    @property
    def _adds_bias(self) -> bool:
        # One rank adds the bias of a product that is summed over ranks.
        return self._part.shard.tp_rank == 0

    def _norm(self, name: str) -> Norm:
        """Return a norm, whose weights stay as exact as the model's dtype has them."""
        spec, weight = self._part.spec.norm, self._factors([(name, ALL)])
        if spec.kind == "layer":
            bias = self._tensor([(f"{name}.bias", ALL)]).float()
            self.num_bytes += bias.nbytes
            return LayerNorm(weight, bias, spec.eps)
        return RmsNorm(weight, spec.eps)

    def _factors(self, rows: Rows) -> torch.Tensor:
        """Return what norms multiply by, joined."""
        weight = self._tensor([(f"{name}.weight", part) for name, part in rows]).float()
        self.num_bytes += weight.nbytes
        return weight + 1.0 if self._part.spec.norm.adds_one else weight

    def _linear(
        self, rows: Rows, has_bias: bool, *, columns: slice = ALL, is_gated: bool = False
    ) -> PackedLinear:
        """Return linears joined along their outputs, `rows` of each, over the same inputs."""
        bias = self._tensor([(f"{n}.bias", part) for n, part in rows]) if has_bias else None
        weight = self._scratched([(f"{n}.weight", part) for n, part in rows], columns)
        linear = self._make_linear(weight, bias, is_gated=is_gated)
        self.num_bytes += linear.num_bytes + (0 if bias is None else bias.nbytes)
        if linear.keeps_weight:
            self._scratch.leave()
        return linear

    def _scratched(self, rows: Rows, *columns: slice) -> torch.Tensor:
        """Return parts of tensors joined along their rows, until it is called again."""
        parts = self._parts(rows, *columns)
        return _join(parts, self._scratch.take(_joined_shape(parts)))

    def _tensor(self, rows: Rows) -> torch.Tensor:
        """Return parts of tensors joined along their rows, in memory of their own."""
        parts = self._parts(rows)
        shape = _joined_shape(parts)
        return _join(parts, torch.empty(shape, dtype=self._dtype, device=self._device))

    def _parts(self, rows: Rows, *columns: slice) -> list[torch.Tensor]:
        return [self._checkpoint.tensor(name, part, *columns) for name, part in rows]


def _joined_shape(parts: list[torch.Tensor]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _join(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write tensors into `out`, joined along their rows, and return it."""
    start = 0
    for part in parts:
        out[start : start + part.shape[0]] = part
        start += part.shape[0]
    return out
