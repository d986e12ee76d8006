"""From the metadata of a GGUF file to a transformers config: the table of architectures.

What llama.cpp knows of an architecture without being told is said here; a key that nobody takes is
an error, for it may change what the model computes. Knows nothing of how tensors are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.model.config_bounds import MOST_LAYERS
from octavo.model.gguf_metadata import GgufFile
from octavo.model.gguf_rope import read_rope

Fields = dict[str, Any]
"""Of a transformers config."""

_ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_EPS = {"rms_norm_eps": "layer_norm_rms_epsilon", "layer_norm_eps": "layer_norm_epsilon"}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture of llama.cpp, as it is in transformers."""

    model_type: str
    architecture: str
    read: Callable[[GgufFile], Fields]
    """Takes the keys that not all have; returns more of a config."""
    has_paired_rows: bool = False
    """Rows of q and k that are rotated together stand side by side, not half a head apart."""
    eps: str = "rms_norm_eps"


def gguf_family(file: GgufFile) -> GgufFamily:
    """Return the family of a file.

    Raises:
        ConfigError: its architecture is not supported.
    """
    arch = file.text("general.architecture")
    # llama.cpp has one architecture here where transformers has two.
    if arch == "llama" and file.integer(".expert_count", 0):
        return _MIXTRAL
    if arch == "olmo2" and file.has(".attention.sliding_window"):
        return _OLMO3
    if arch not in _FAMILIES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not supported; allowed are {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[arch]


def model_config(file: GgufFile) -> Fields:
    """Return the transformers config of a GGUF file.

    Raises:
        ConfigError: what it holds is not supported.
    """
    family = gguf_family(file)
    head_dim, num_heads = _head_dim(file), file.integer(".attention.head_count")
    if file.integer(".attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"GGUF metadata must have value_length {head_dim}, the size of a head")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path.name} has no tensor 'token_embd.weight'")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    if file.integer(".vocab_size", vocab_size) != vocab_size:
        raise ConfigError(
            f"GGUF metadata must have vocab_size {vocab_size:,}, as token_embd.weight"
        )
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": file.integer(".embedding_length"),
        "intermediate_size": file.integer(".feed_forward_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(".context_length"),
        family.eps: file.number(f".attention.{_EPS[family.eps]}"),
        "rope_parameters": read_rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
        **family.read(file),
    }
    unknown = file.unread_keys()
    if unknown:
        raise ConfigError(f"GGUF metadata {', '.join(unknown)} is not supported")
    return config


def _num_layers(file: GgufFile) -> int:
    count = file.integer(".block_count")
    if count > MOST_LAYERS:
        raise ConfigError(f"GGUF metadata has block_count {count:,}, more than {MOST_LAYERS:,}")
    return count


def _head_dim(file: GgufFile) -> int:
    num_heads = file.integer(".attention.head_count")
    derived = file.integer(".embedding_length") // max(num_heads, 1)
    return file.integer(".attention.key_length", derived)


def _token_ids(file: GgufFile) -> Fields:
    ends = [file.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    tokens = file.items("tokenizer.ggml.tokens", str)
    # Some files name the end of a text alone; llama.cpp knows those of a turn by what they read.
    ends += [tokens.index(token) for token in _ENDS_OF_TURNS if token in tokens]
    ids = list(dict.fromkeys(index for index in ends if index is not None))
    return {
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": file.integer("tokenizer.ggml.padding_token_id", None),
    }


def _biases(file: GgufFile) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _llama(file: GgufFile) -> Fields:
    return {**_biases(file), "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _smollm3(file: GgufFile) -> Fields:
    # llama.cpp rotates in three of four layers.
    return {**_llama(file), "no_rope_layer_interval": 4, "use_sliding_window": False}


def _granite(file: GgufFile) -> Fields:
    return {
        **_llama(file),
        "attention_multiplier": file.number(".attention.scale"),
        "embedding_multiplier": file.number(".embedding_scale"),
        "residual_multiplier": file.number(".residual_scale"),
        "logits_scaling": file.number(".logit_scale"),
    }


def _qwen2(_: GgufFile) -> Fields:
    return {"use_sliding_window": False}


def _qwen3(file: GgufFile) -> Fields:
    return {**_biases(file), "use_sliding_window": False}


def _experts(file: GgufFile) -> Fields:
    return {
        "num_experts": file.integer(".expert_count"),
        "num_experts_per_tok": file.integer(".expert_used_count"),
    }


def _mixtral(file: GgufFile) -> Fields:
    experts = _experts(file)
    return {**experts, "num_local_experts": experts.pop("num_experts"), "sliding_window": None}


def _qwen3_moe(file: GgufFile) -> Fields:
    # llama.cpp has experts in all layers, and makes the weights of a token's add up to one.
    return {
        **_qwen3(file),
        **_experts(file),
        "moe_intermediate_size": file.integer(".expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(file: GgufFile) -> Fields:
    return {**_biases(file), **_experts(file), "norm_topk_prob": False}


def _phi3(file: GgufFile) -> Fields:
    original = file.integer(".rope.scaling.original_context_length")
    window = file.integer(".attention.sliding_window", 0)
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _olmo3(file: GgufFile) -> Fields:
    rope = read_rope(file, _head_dim(file))
    return {
        **_biases(file),
        "sliding_window": file.integer(".attention.sliding_window"),
        "layer_types": _layer_types(file, full_every=4),
        "rope_parameters": _ropes(rope, file.number(".rope.freq_base_swa", rope["rope_theta"])),
    }


def _gemma(_: GgufFile) -> Fields:
    return dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")


def _gemma2(file: GgufFile) -> Fields:
    return {
        **_gemma(file),
        "sliding_window": file.integer(".attention.sliding_window"),
        "layer_types": _layer_types(file, full_every=2),
        "attn_logit_softcapping": file.number(".attn_logit_softcapping"),
        "final_logit_softcapping": file.number(".final_logit_softcapping"),
        "query_pre_attn_scalar": _score_size(file, layers_of_27b=46),
    }


def _gemma3(file: GgufFile) -> Fields:
    window = file.integer(".attention.sliding_window", 0)
    rope = read_rope(file, _head_dim(file))
    return {
        **_gemma(file),
        # Without one no layer has it.
        "sliding_window": window or 1,
        "layer_types": _layer_types(file, full_every=6 if window else 1),
        "final_logit_softcapping": file.number(".final_logit_softcapping", None),
        "query_pre_attn_scalar": _score_size(file, layers_of_27b=62),
        "rope_parameters": _ropes(rope, file.number(".rope.freq_base_swa", 10_000.0)),
    }


def _score_size(file: GgufFile, layers_of_27b: int) -> int:
    """Return the size that scores are scaled by; llama.cpp knows the largest by its layers."""
    if _num_layers(file) == layers_of_27b:
        return file.integer(".embedding_length") // max(file.integer(".attention.head_count"), 1)
    return _head_dim(file)


def _layer_types(file: GgufFile, full_every: int) -> list[str]:
    """Return which layers have a window: as flags say, or all but every n-th."""
    key = ".attention.sliding_window_pattern"
    if file.is_list(key):
        flags = file.items(key, bool)
    else:
        every = file.integer(key, full_every)
        flags = [every == 0 or (index + 1) % every != 0 for index in range(_num_layers(file))]
    return ["sliding_attention" if own else "full_attention" for own in flags]


def _ropes(full: Fields, window_theta: float) -> Fields:
    narrow = {"rope_type": "default", "rope_theta": window_theta}
    return {"full_attention": full, "sliding_attention": narrow}


def _stablelm(file: GgufFile) -> Fields:
    return {
        "use_parallel_residual": file.flag(".use_parallel_residual"),
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


#: By `general.architecture`.
_FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", _llama, has_paired_rows=True),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", _smollm3, has_paired_rows=True),
    "granite": GgufFamily("granite", "GraniteForCausalLM", _granite, has_paired_rows=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "phi3": GgufFamily("phi3", "Phi3ForCausalLM", _phi3),
    "gemma": GgufFamily("gemma", "GemmaForCausalLM", _gemma),
    "gemma2": GgufFamily("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": GgufFamily("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", _biases),
    "olmoe": GgufFamily("olmoe", "OlmoeForCausalLM", _olmoe),
    "stablelm": GgufFamily("stablelm", "StableLmForCausalLM", _stablelm, eps="layer_norm_eps"),
}
_MIXTRAL = GgufFamily("mixtral", "MixtralForCausalLM", _mixtral, has_paired_rows=True)
_OLMO3 = GgufFamily("olmo3", "Olmo3ForCausalLM", _olmo3)
