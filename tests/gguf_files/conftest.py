from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

HEADS, KV_HEADS = 4, 2
TOKENS = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "hi", "<tool>"]
TYPES = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 258 + [TokenType.USER_DEFINED]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "router": "ffn_gate_inp",
}
MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]


@pytest.fixture
def make_model() -> MakeModel:
    """Make a tiny random transformers model whose values bfloat16 holds exactly."""
    return _make_model


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Write a model (a tiny Llama by default) as llama.cpp's converter would.

    `metadata` changes keys, or drops those that are None.
    """

    def make(metadata: dict[str, Any] | None = None, model: Any = None) -> Path:
        model = _make_model("llama") if model is None else model
        path = tmp_path / "tiny.gguf"
        values = _metadata(model.config) | (metadata or {})
        writer = GGUFWriter(path, values.pop("general.architecture", model.config.model_type))
        _write(writer, values, model)
        return path

    return make


@pytest.fixture
def tiny_gguf(make_gguf: MakeGguf) -> Path:
    return make_gguf()


def _make_model(arch: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        arch,
        vocab_size=len(TOKENS),
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=4,
        num_hidden_layers=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **options,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    return model


def _metadata(config: Any) -> dict[str, Any]:
    arch = config.model_type
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.rope.freq_base": 5000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in TYPES],
        "tokenizer.ggml.merges": ["1 2", "h i"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _write(writer: GGUFWriter, metadata: dict[str, Any], model: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
        bool: writer.add_bool,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            writer.add_tensor(*_gguf_tensor(name, tensor.numpy(), model.config.model_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensor(name: str, values: Any, arch: str) -> tuple[str, Any]:
    module, _, kind = name.rpartition(".")
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.{kind}", values
    _, _, layer, module = module.split(".", 3)
    if arch == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        # What llama.cpp's own converter does to these rows.
        num_heads = HEADS if module == "self_attn.q_proj" else KV_HEADS
        halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}", values
