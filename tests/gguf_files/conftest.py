"""Tiny random models of every family that GGUF holds, written as llama.cpp's converter writes them.

What is written was compared with what convert_hf_to_gguf.py makes of the same checkpoints, key by
key and tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "hi", "<tool>"]
TYPES = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 258 + [TokenType.USER_DEFINED]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.5],
    "original_max_position_embeddings": 128,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3}
WINDOW = {"head_dim": 20, "sliding_window": 40, "query_pre_attn_scalar": 20}
#: By name: model_type, and what its config has beside SHAPE and ROPE.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_3": ("llama", {"tie_word_embeddings": True, "rope_parameters": ROPE | LLAMA3}),
    "linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "smollm3": ("smollm3", {"attention_bias": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3moe": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 20, "moe_intermediate_size": 28, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", EXPERTS),
    "phi3": ("phi3", {"sliding_window": 40, "original_max_position_embeddings": 1024}),
    "phi4": (
        "phi3",
        {
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 128,
            "rope_parameters": ROPE | LONG,
        },
    ),
    "gemma": ("gemma", {"head_dim": 20, "rope_parameters": None}),
    "gemma2": ("gemma2", {**WINDOW, "attn_logit_softcapping": 20.0, "rope_parameters": None}),
    "gemma3": (
        "gemma3_text",
        {**WINDOW, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 40, "rope_parameters": None}),
    "stablelm": (
        "stablelm",
        {"use_qkv_bias": True, "rope_parameters": {**ROPE, "rope_theta": 10000.0}},
    ),
}
CASES["stablelm_12b"] = (
    "stablelm",
    {**CASES["stablelm"][1], "use_parallel_residual": True, "qk_layernorm": True},
)
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
}
_PAIRED = ("llama", "mistral", "mixtral", "smollm3", "granite")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "router": "router",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]


@pytest.fixture
def make_model() -> MakeModel:
    """Make a tiny random transformers model of a case, its values such as bfloat16 has."""
    return _make_model


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Write a model (a tiny Llama by default) as llama.cpp's converter would.

    `metadata` changes keys, or drops those that are None; `kind` is the type of matrices whose rows
    can have it.
    """

    def make(
        metadata: dict[str, Any] | None = None,
        model: Any = None,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    ) -> Path:
        model = _make_model("linear", rope_parameters=ROPE) if model is None else model
        path = tmp_path / "tiny.gguf"
        write_gguf(path, model, metadata or {}, kind)
        return path

    return make


@pytest.fixture
def tiny_gguf(make_gguf: MakeGguf) -> Path:
    return make_gguf()


def _make_model(case: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model_type, own = CASES[case]
    values = {**SHAPE, "rope_parameters": ROPE, **own, **options}
    values = {key: value for key, value in values.items() if key == "pad_token_id" or value}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    model = model.float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    return model


def write_gguf(
    path: Path, model: Any, metadata: dict[str, Any], kind: GGMLQuantizationType
) -> None:
    config = model.config
    arch = _ARCHITECTURES.get(config.model_type, config.model_type)
    own = {f"{arch}.{key}": value for key, value in _keys(config).items()}
    values = own | _vocabulary(arch) | metadata
    writer = GGUFWriter(path, values.pop("general.architecture", arch))
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
        bool: writer.add_bool,
    }
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in gguf_tensors(model):
        is_vector = tensor.ndim < 2 or tensor.shape[-1] % 32 or name.endswith("_inp.weight")
        own_kind = GGMLQuantizationType.F32 if is_vector else kind
        writer.add_tensor(name, quants.quantize(tensor, own_kind), raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(config: Any) -> dict[str, Any]:
    """Return the metadata of an architecture, without its name."""
    kind = config.model_type
    nested = config.rope_parameters
    rope = nested.get("full_attention", nested)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eps = "layer_norm_eps" if kind == "stablelm" else "rms_norm_eps"
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.layer_norm_{'' if kind == 'stablelm' else 'rms_'}epsilon": getattr(config, eps),
    }
    if kind not in ("granite", "phi3", "stablelm") and config.to_dict().get("head_dim"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind not in ("gemma", "gemma2", "stablelm"):
        keys["rope.freq_base"] = rope["rope_theta"]
    if kind in _PAIRED:
        keys |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if "sliding_attention" in nested:
        keys["rope.freq_base_swa"] = nested["sliding_attention"]["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    names = _OWN_KEYS.get(kind, {})
    found = {key: getattr(config, name, None) for key, name in names.items()}
    keys |= {key: value for key, value in found.items() if value is not None}
    if kind in ("phi3", "stablelm"):
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind == "phi3":
        keys["attention.sliding_window"] = config.sliding_window or 0
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        growth = np.log(config.max_position_embeddings / original) / np.log(original)
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + growth))
    if kind == "olmo3":
        flags = [name == "sliding_attention" for name in config.layer_types]
        keys["attention.sliding_window_pattern"] = flags
    return keys


_MIXTURE = {"expert_used_count": "num_experts_per_tok"}
_OWN_KEYS = {
    "mixtral": {**_MIXTURE, "expert_count": "num_local_experts"},
    "qwen3_moe": {
        **_MIXTURE,
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "olmoe": {**_MIXTURE, "expert_count": "num_experts"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "phi3": {"rope.scaling.original_context_length": "original_max_position_embeddings"},
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": {
        "attention.sliding_window": "sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "olmo3": {"attention.sliding_window": "sliding_window"},
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}


def _vocabulary(arch: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if arch == "qwen2" else "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in TYPES],
        "tokenizer.ggml.merges": ["1 2", "h i"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def gguf_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a GGUF file, float32."""
    config = model.config
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        exponents = torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled))
        yield "rope_freqs.weight", (rope["rope_theta"] ** -exponents / scaled).numpy()
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)
    for name, values in _joined_norms(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        module, _, kind = name.rpartition(".")
        if module in _TOP_NAMES:
            yield f"{_TOP_NAMES[module]}.{kind}", values
            continue
        _, _, layer, own = name.split(".", 3)
        yield from _layer_tensors(config, layer, own, values)


def _joined_norms(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, the norms of single heads stacked."""
    for name, parameter in state.items():
        first = name.removesuffix(".norms.0.weight")
        if first != name:
            of_heads = [own for key, own in state.items() if key.startswith(f"{first}.norms.")]
            yield f"{first}.weight", torch.stack(of_heads).numpy()
        elif ".norms." not in name:
            yield name, parameter.numpy()


def _layer_tensors(config: Any, layer: str, name: str, values: Any) -> Iterator[tuple[str, Any]]:
    if name == "mlp.experts.gate_up_proj":
        for half, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{half}_exps.weight", np.ascontiguousarray(part)
        return
    name = f"{name}.weight" if name == "mlp.experts.down_proj" else name
    module, _, kind = name.rpartition(".")
    if config.model_type in _PAIRED and module in ("self_attn.q_proj", "self_attn.k_proj"):
        is_query = module == "self_attn.q_proj"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    if module == "post_attention_layernorm":
        has_both = re.match("gemma[23]|olmo[23]", config.model_type)
        own = "post_attention_norm" if has_both else "ffn_norm"
    else:
        own = _LAYER_NAMES[module]
    yield f"blk.{layer}.{own}.{kind}", values
