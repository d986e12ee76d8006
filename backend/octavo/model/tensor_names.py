"""What a checkpoint holds: the names and shapes of its tensors, as transformers writes them.

Names follow from the properties of a spec, never from a family. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.model.expert_names import expert_tensors
from octavo.model.shard import ModelPart
from octavo.model.spec import ModelSpec

Rows = Sequence[tuple[str, slice]]
"""Some rows of each of several tensors, one behind the other."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
LM_HEAD = "lm_head"
ALL = slice(None)

# Within a layer.
OUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FUSED_QKV, _FUSED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_OWN_HEAD_NORMS = ("self_attn.q_layernorm.norms.", "self_attn.k_layernorm.norms.")


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a checkpoint of this spec has."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (spec.vocab_size, hidden),
        f"{FINAL_NORM}.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes[f"{LM_HEAD}.weight"] = (spec.vocab_size, hidden)
    if spec.norm.kind == "layer":
        shapes[f"{FINAL_NORM}.bias"] = (hidden,)
    layers = {has_experts: _layer_tensors(spec, has_experts) for has_experts in (False, True)}
    for index in range(spec.num_layers):
        layer = layers[spec.has_experts(index)]
        shapes |= {f"{layer_prefix(index)}{name}": shape for name, shape in layer.items()}
    return shapes


def layer_prefix(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def layer_norms(spec: ModelSpec) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the names of a layer's norms, None for one that it has not.

    They are those of what attention reads, of what it makes, of what the MLP reads and of what it
    makes. The second is called as the third is where there is no second.
    """
    reads, makes = spec.has_input_norms, spec.has_output_norms
    mlp_reads = "pre_feedforward_layernorm" if makes else "post_attention_layernorm"
    return (
        "input_layernorm" if reads else None,
        "post_attention_layernorm" if makes else None,
        mlp_reads if reads and not spec.is_parallel else None,
        "post_feedforward_layernorm" if makes else None,
    )


def qkv_rows(part: ModelPart, prefix: str) -> Rows:
    """Return where a part's rows of q, k and v lie."""
    head_dim, whole = part.spec.head_dim, part.whole
    sizes = (whole.num_heads, whole.num_kv_heads, whole.num_kv_heads)
    rows = (part.heads, part.kv_heads, part.kv_heads)
    if part.spec.fused_projections:
        return _fused_rows(f"{prefix}{_FUSED_QKV}", sizes, rows, head_dim)
    return [(f"{prefix}{name}", span(own, head_dim)) for name, own in zip(_QKV, rows, strict=True)]


def gate_up_rows(part: ModelPart, prefix: str) -> Rows:
    """Return where a part's rows of gate and up lie."""
    if part.spec.fused_projections:
        sizes = (part.whole.intermediate_size,) * 2
        return _fused_rows(f"{prefix}{_FUSED_GATE_UP}", sizes, (part.inner,) * 2, 1)
    return [(f"{prefix}{name}", span(part.inner)) for name in _GATE_UP]


def head_norm_rows(part: ModelPart, prefix: str) -> tuple[Rows, Rows]:
    """Return where the weights lie by which a part's queries are normalised, and its keys."""
    kind, heads = part.spec.qk_norm, (part.heads, part.kv_heads)
    if kind == "own":
        q, k = (
            [(f"{prefix}{name}{head}", ALL) for head in own]
            for name, own in zip(_OWN_HEAD_NORMS, heads, strict=True)
        )
        return q, k
    spans = [span(own, part.spec.head_dim) if kind == "all" else ALL for own in heads]
    q, k = ([(f"{prefix}{name}", own)] for name, own in zip(_HEAD_NORMS, spans, strict=True))
    return q, k


def span(part: range, unit: int = 1) -> slice:
    """Return the rows or columns of a range of things of `unit` rows or columns each."""
    return slice(part.start * unit, part.stop * unit)


def _fused_rows(name: str, sizes: Sequence[int], rows: Sequence[range], unit: int) -> Rows:
    """Return ranges of things that lie behind each other in one tensor, `sizes` of each."""
    found, start = [], 0
    for size, own in zip(sizes, rows, strict=True):
        found.append((name, span(range(start + own.start, start + own.stop), unit)))
        start += size
    return found


def _layer_tensors(spec: ModelSpec, has_experts: bool) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer by their names within it."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {OUT: (hidden, q_size, spec.o_bias)}
    if spec.fused_projections:
        linears[_FUSED_QKV] = (q_size + 2 * kv_size, hidden, spec.qkv_bias)
    else:
        for name, size in zip(_QKV, (q_size, kv_size, kv_size), strict=True):
            linears[name] = (size, hidden, spec.qkv_bias)
    if not has_experts:
        linears[DOWN] = (hidden, inner, spec.mlp_bias)
        gate_up = {_FUSED_GATE_UP: 2 * inner} if spec.fused_projections else {}
        gate_up = gate_up or dict.fromkeys(_GATE_UP, inner)
        linears |= {name: (size, hidden, spec.mlp_bias) for name, size in gate_up.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if has_experts and spec.experts is not None:
        shapes |= expert_tensors(spec.experts, hidden)
    factors = ("weight", "bias") if spec.norm.kind == "layer" else ("weight",)
    norms = [name for name in layer_norms(spec) if name is not None]
    shapes |= {f"{name}.{factor}": (hidden,) for name in norms for factor in factors}
    return shapes | _head_norm_tensors(spec)


def _head_norm_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    head_dim, counts = spec.head_dim, (spec.num_heads, spec.num_kv_heads)
    if spec.qk_norm is None:
        return {}
    if spec.qk_norm == "own":
        groups = zip(_OWN_HEAD_NORMS, counts, strict=True)
        names = [f"{name}{head}.weight" for name, count in groups for head in range(count)]
        return dict.fromkeys(names, (head_dim,))
    sizes = [head_dim * (count if spec.qk_norm == "all" else 1) for count in counts]
    return {f"{name}.weight": (size,) for name, size in zip(_HEAD_NORMS, sizes, strict=True)}
