"""How each family says in its config what a `ModelSpec` says: one function for each.

A function takes the fields that only its family has, or that it reads in its own way, and returns
fields of ModelSpec; what all read alike is in `families`. Knows nothing of files or tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.model.config_fields import ConfigFields
from octavo.model.expert_fields import experts_of_all_layers, sparse_layers
from octavo.model.layer_kinds import (
    Ropes,
    Sizes,
    Windows,
    checked_window,
    full_windows,
    late_windows,
    one_rope,
    optional_window,
    rope_parameters,
    ropes_by_type,
    rotating_layers,
    same_windows,
    windows_by_type,
)
from octavo.model.rope import RopeSpec
from octavo.model.spec import NormSpec

Found = dict[str, Any]
"""Fields of ModelSpec."""


def llama(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Llama 1 to 3, SmolLM 1 and 2, and others of that form."""
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "ropes": one_rope(fields, sizes),
        "windows": full_windows(sizes),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def mistral(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Mistral."""
    return {
        **_silu_and_rms(fields),
        "ropes": one_rope(fields, sizes),
        # Absent is not null: transformers reads an absent field of this family as 4096.
        "windows": same_windows(fields, sizes, absent=4096),
    }


def qwen2(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Qwen 2 and 2.5."""
    return {
        **_silu_and_rms(fields),
        "ropes": one_rope(fields, sizes),
        "windows": late_windows(fields, sizes),
        "qkv_bias": True,
    }


def qwen3(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Qwen 3."""
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "ropes": one_rope(fields, sizes),
        "windows": late_windows(fields, sizes),
        "qk_norm": "head",
    }


def smollm3(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read SmolLM 3: some layers do not rotate, and those alone may have a window."""
    rope, rotates = one_rope(fields, sizes, theta=2_000_000.0)[0], rotating_layers(fields, sizes)
    window = optional_window(fields)
    names = ["full_attention" if own or window is None else "sliding_attention" for own in rotates]
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "ropes": tuple(rope if own else None for own in rotates),
        "windows": windows_by_type(fields, sizes, window, names),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def phi3(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Phi 3, 3.5 and 4."""
    # Of code that came with checkpoints; transformers' own does not know them.
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    return {
        **_silu_and_rms(fields),
        "ropes": _phi_ropes(fields, sizes),
        "windows": same_windows(fields, sizes, absent=None),
        "fused_projections": True,
    }


def granite(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Granite 3: Llama with four multipliers."""
    return {
        **llama(fields, sizes),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }


def olmo2(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read OLMo 2: norms stand behind the blocks, and over all heads."""
    return {
        **_olmo_layer(fields),
        "ropes": one_rope(fields, sizes),
        "windows": full_windows(sizes),
    }


def olmo3(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read OLMo 3: OLMo 2 with windows in three of four layers, which are never scaled."""
    window = checked_window(fields, fields.raw("sliding_window", 4096))
    names = [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(sizes.num_layers)
    ]
    windows = windows_by_type(fields, sizes, window, names)
    # transformers gives another one to the layers without a window alone.
    fields.only("rope_theta", 500_000)
    return {
        **_olmo_layer(fields),
        "ropes": ropes_by_type(fields, sizes, windows, 500_000.0, 500_000.0),
        "windows": windows,
    }


def mixtral(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Mixtral: Mistral with experts in every layer."""
    inner = sizes.intermediate_size
    experts = experts_of_all_layers(fields, sizes, inner=inner, normalizes=True)
    return {
        **_silu_and_rms(fields),
        "ropes": one_rope(fields, sizes),
        "windows": same_windows(fields, sizes, absent=None),
        "experts": replace(experts, stored="block_sparse_moe"),
    }


def qwen3_moe(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Qwen 3 with experts in some layers."""
    inner, normalizes = (
        fields.integer("moe_intermediate_size"),
        fields.flag("norm_topk_prob", False),
    )
    experts = experts_of_all_layers(fields, sizes, inner=inner, normalizes=normalizes)
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "ropes": one_rope(fields, sizes),
        "windows": (optional_window(fields),) * sizes.num_layers,
        "qk_norm": "head",
        "experts": replace(experts, layers=sparse_layers(fields, sizes)),
    }


def olmoe(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read OLMoE: experts in every layer, and norms over all heads."""
    inner = sizes.intermediate_size
    normalizes = fields.flag("norm_topk_prob", False)
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "ropes": one_rope(fields, sizes),
        "windows": full_windows(sizes),
        "qk_norm": "all",
        "experts": experts_of_all_layers(fields, sizes, inner=inner, normalizes=normalizes),
    }


def gemma(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Gemma 1."""
    return {
        **_gemma_layer(fields, sizes),
        "ropes": one_rope(fields, sizes),
        "windows": full_windows(sizes),
    }


def gemma2(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read Gemma 2: norms on both sides of the blocks, caps, and windows in every second layer."""
    return {
        **_gemma_layer(fields, sizes),
        "ropes": one_rope(fields, sizes),
        "windows": _gemma_windows(fields, sizes, full_every=2),
        "has_output_norms": True,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": fields.optional_number("attn_logit_softcapping", 50.0),
        "logit_cap": fields.optional_number("final_logit_softcapping", 30.0),
    }


def gemma3(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read the text of Gemma 3: normalised heads, and other rotations where there is a window."""
    older = fields.integer("_sliding_window_pattern", 6)
    pattern = fields.integer("sliding_window_pattern", older)
    windows = _gemma_windows(fields, sizes, full_every=pattern)
    theta = fields.optional_number("rope_theta") or 1_000_000.0
    window_theta = fields.optional_number("rope_local_base_freq") or 10_000.0
    return {
        **_gemma_layer(fields, sizes),
        "ropes": ropes_by_type(fields, sizes, windows, theta, window_theta),
        "windows": windows,
        "has_output_norms": True,
        "qk_norm": "head",
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_cap": fields.optional_number("final_logit_softcapping"),
    }


def stablelm(fields: ConfigFields, sizes: Sizes) -> Found:
    """Read StableLM 2 and 3B, and others of that form."""
    fields.choice("hidden_act", ("silu",), "silu")
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:
        raise fields.error("head_dim", sizes.head_dim, "hidden_size / num_attention_heads")
    return {
        "norm": NormSpec("layer", fields.number("layer_norm_eps")),
        "ropes": one_rope(fields, sizes, partial=0.25),
        "windows": full_windows(sizes),
        "qk_norm": "own" if fields.flag("qk_layernorm", False) else None,
        "qkv_bias": fields.flag("use_qkv_bias", False),
        "is_parallel": fields.flag("use_parallel_residual", False),
    }


def _gemma_layer(fields: ConfigFields, sizes: Sizes) -> Found:
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    # An older field for it, with an older name.
    fields.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
    return {
        **_attention_bias(fields),
        "norm": NormSpec("rms", fields.number("rms_norm_eps"), adds_one=True),
        "activation": "gelu",
        "embedding_scale": sizes.hidden_size**0.5,
        "rounds_embedding_scale": True,
    }


def _gemma_windows(fields: ConfigFields, sizes: Sizes, full_every: int) -> Windows:
    window = checked_window(fields, fields.raw("sliding_window", 4096))
    names = [
        "sliding_attention" if (i + 1) % full_every else "full_attention"
        for i in range(sizes.num_layers)
    ]
    return windows_by_type(fields, sizes, window, names)


def _silu_and_rms(fields: ConfigFields) -> Found:
    fields.choice("hidden_act", ("silu",), "silu")
    return {"norm": NormSpec("rms", fields.number("rms_norm_eps"))}


def _attention_bias(fields: ConfigFields) -> Found:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _olmo_layer(fields: ConfigFields) -> Found:
    return {
        **_silu_and_rms(fields),
        **_attention_bias(fields),
        "has_input_norms": False,
        "has_output_norms": True,
        "qk_norm": "all",
    }


def _phi_ropes(fields: ConfigFields, sizes: Sizes) -> Ropes:
    parameters = rope_parameters(fields)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    # Two older names of longrope.
    kinds = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
    if not isinstance(kind, str) or kind not in kinds:
        raise fields.error("rope_type", kind, "one of " + ", ".join(kinds))
    parameters |= {
        "rope_type": kinds[kind],
        "original_max_position_embeddings": fields.integer(
            "original_max_position_embeddings", 4096
        ),
    }
    partial = fields.number("partial_rotary_factor", 1.0)
    theta = fields.optional_number("rope_theta")
    rope = RopeSpec.from_fields(parameters, sizes.head_dim, theta, sizes.max_len, partial)
    return (rope,) * sizes.num_layers
