"""Shapes of tiny models of every architecture that is tried, and checkpoints with random weights.

Tests and the table of models have them in common. Sizes are odd on purpose: nothing is a multiple
of a vector or of another size by accident.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_NEAR = {"rope_type": "default", "rope_theta": 500.0}
_STRETCHED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
#: Of the native decoder: model_type, or a name of what has one -> what is beside SHAPE.
NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 40},
    "qwen2": {},
    "qwen3": {"head_dim": 20},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {
        "head_dim": 20,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 4},
    "smollm3": {"no_rope_layers": [1, 0, 1], "mlp_bias": True},
    "phi3": {"sliding_window": 40, "partial_rotary_factor": 0.75},
    "gemma": {"head_dim": 20},
    "gemma2": {"head_dim": 20, "sliding_window": 40, "query_pre_attn_scalar": 30},
    "gemma3_text": {
        "head_dim": 20,
        "sliding_window": 40,
        "layer_types": _KINDS,
        "rope_parameters": {"full_attention": _STRETCHED, "sliding_attention": _NEAR},
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 40, "layer_types": _KINDS},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm with norms of heads": {
        "model_type": "stablelm",
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
}
SHAPE = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": None,
}

BASE = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 106,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
GROUPED = {**BASE, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 14}
SLIDING = {
    "sliding_window": 30,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
OLD_NAMES = {
    "vocab_size": 331,
    "n_embd": 60,
    "n_head": 6,
    "n_layer": 3,
    "n_positions": 128,
    "n_inner": 106,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

#: Of those that run by transformers' code over paged KV: model_type -> fields.
PAGED: dict[str, dict[str, Any]] = {
    "apertus": {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": GROUPED,
    "biogpt": BASE,
    "bitnet": GROUPED,
    "codegen": {**OLD_NAMES, "n_embd": 56, "n_head": 4, "rotary_dim": 6},
    "cohere": {**GROUPED, "use_qk_norm": True},
    "cohere2": {**WIDE, **SLIDING},
    "ctrl": {
        "vocab_size": 331,
        "n_positions": 128,
        "n_embd": 60,
        "dff": 106,
        "n_layer": 3,
        "n_head": 6,
    },
    "cwm": {**WIDE, **SLIDING},
    "ernie4_5": WIDE,
    "exaone4": {**WIDE, **SLIDING},
    "gemma2": {**WIDE, **SLIDING, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
    "glm": WIDE,
    "glm4": WIDE,
    "gpt2": OLD_NAMES,
    "gpt_bigcode": OLD_NAMES,
    "gpt_neox": {**BASE, "rotary_pct": 0.4},
    "gpt_oss": {**WIDE, **SLIDING, **EXPERTS, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    "gptj": {**OLD_NAMES, "rotary_dim": 4},
    "granite_swa": {**GROUPED, **SLIDING},
    "helium": {**GROUPED, "head_dim": 10},
    "hunyuan_v1_dense": WIDE,
    "jais2": WIDE,
    "mixtral": {**GROUPED, **EXPERTS},
    "ministral3": {
        **WIDE,
        "rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
    },
    "modernbert-decoder": {**BASE, "local_attention": 30, "global_attn_every_n_layers": 2},
    "nanochat": GROUPED,
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "opt": {**BASE, "ffn_dim": 106, "word_embed_proj_dim": 52},
    "persimmon": {**BASE, "hidden_size": 48, "partial_rotary_factor": 0.5},
    "phi": {**GROUPED, "partial_rotary_factor": 0.4},
    "qwen3_moe": {**WIDE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 30},
    "seed_oss": WIDE,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": 30},
    "vaultgemma": {**WIDE, **SLIDING, "attn_logit_softcapping": 3.0},
}

EOS = 7
VOCAB_SIZE = 257
"""A byte each, and the end of text."""
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
_STATE_SPACE = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LATENT = {
    **_ATTENTION,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
}
#: Of the traditional mode: model_type -> fields.
STATIC: dict[str, dict[str, Any]] = {
    "mamba": _STATE_SPACE,
    "mamba2": {**_STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": _STATE_SPACE,
    "jamba": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {
        **_ATTENTION,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 16,
    },
    "llama": _ATTENTION,
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "falcon": {
        **_ATTENTION,
        "alibi": True,
        "new_decoder_architecture": False,
        "multi_query": False,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bart": {**_BART, "decoder_start_token_id": EOS},
    "marian": {**_BART, "decoder_start_token_id": 0},
}


def save_native(name: str, folder: Path) -> None:
    """Write the checkpoint of one of NATIVE; its weights follow from its place there."""
    torch.manual_seed(list(NATIVE).index(name))
    config = AutoConfig.for_model(**{"model_type": name, **SHAPE, **NATIVE[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        # The default initialisation is so small that every logit is nearly the same.
        if "norm" not in key:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)


def save_paged(model_type: str, folder: Path, **fields: Any) -> Any:
    """Write a checkpoint for transformers' code over paged KV; return its model."""
    torch.manual_seed(len(model_type))
    tokens = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **tokens, **fields)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    for parameter in model.parameters():
        # Fresh weights are so small that every logit is nearly the same, fresh biases are zero
        # and fresh norms one: whoever forgot them would pass.
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model.eval()


def save_static(model_type: str, folder: Path) -> None:
    """Write the checkpoint of one of STATIC."""
    _random_model(model_type).save_pretrained(folder)


def _random_model(name: str) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, **{**_IDS, **STATIC[name]})
    model = static_factory(config).from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        # The default initialisation is so small that every logit is nearly the same.
        is_own = any(part in key for part in ("norm", "A_log", "dt", ".D", "time_", "rg_lru"))
        if parameter.requires_grad and not is_own:
            parameter.data.normal_(std=0.8 if config.is_encoder_decoder else 0.3)
    # transformers would make the last token that fits the end of text, whatever the model says.
    model.generation_config.forced_eos_token_id = None
    if name == "bart":
        model.generation_config.forced_bos_token_id = 3
    return model


def static_factory(config: Any) -> Any:
    """Return what makes or loads the model of a config."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM
