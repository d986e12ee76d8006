"""Which tensors of a GGUF file a checkpoint is made of, and by what change of their rows.

What a checkpoint of a config must hold says what the file must hold. Rows are quantised each for
itself, so those of a tensor can be put in another order before they are dequantised. Knows nothing
of how they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.model.families import spec_from_config
from octavo.model.gguf_families import gguf_family
from octavo.model.gguf_metadata import GgufFile
from octavo.model.gguf_rope import ROPE_TENSORS
from octavo.model.gguf_weights import CheckpointTensor, check_types
from octavo.model.spec import ModelSpec
from octavo.model.tensor_check import check_shapes
from octavo.model.tensor_names import expected_tensors

_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm.norms": "attn_q_norm",
    "self_attn.k_layernorm.norms": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
#: GGUF has those that a checkpoint numbers within a layer in one tensor.
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def checkpoint_tensors(file: GgufFile, config: Mapping[str, Any]) -> list[CheckpointTensor]:
    """Return the tensors of the checkpoint of a file, of which it holds each and no others.

    Args:
        file: the open GGUF file.
        config: its transformers config.

    Raises:
        ConfigError: the config is not supported, or tensors are missing, unexpected, mis-shaped or
            of a type that cannot be dequantised.
    """
    spec = spec_from_config(config)
    has_pairs = gguf_family(file).has_paired_rows
    tensors = [_tensor(name, shape, spec) for name, shape in expected_tensors(spec).items()]
    expected = {
        tensor.source: tensor.shape if tensor.index is None else (tensor.index + 1, *tensor.shape)
        for tensor in tensors
    }
    found = {
        name: tensor.shape for name, tensor in file.tensors.items() if name not in ROPE_TENSORS
    }
    check_shapes(str(file.path), expected, found, [])
    check_types(file)
    return [_with_rows(tensor, spec) for tensor in tensors] if has_pairs else tensors


def _tensor(name: str, shape: tuple[int, ...], spec: ModelSpec) -> CheckpointTensor:
    added = -1.0 if spec.norm.adds_one and name.endswith("norm.weight") else 0.0
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        return CheckpointTensor(name, shape, f"{_TOP_NAMES[module]}.{kind}", None, added=added)
    layer, module, kind = match.groups()
    number = _NUMBER.search(module)
    module = _NUMBER.sub("", module)
    if module == "post_attention_layernorm":
        source = "post_attention_norm" if spec.has_output_norms else "ffn_norm"
    else:
        source = _LAYER_NAMES[module]
    index = None if number is None else int(number[1])
    return CheckpointTensor(name, shape, f"blk.{layer}.{source}.{kind}", index, added=added)


def _with_rows(tensor: CheckpointTensor, spec: ModelSpec) -> CheckpointTensor:
    """Return a tensor of a file that has the rows of a pair side by side, with its rows in order.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head; transformers and our kernels rotate
    (i, i + head_dim / 2).
    """
    if not re.search(r"\.self_attn\.[qk]_proj\.", tensor.name):
        return tensor
    pairs = np.arange(tensor.shape[0]).reshape(-1, spec.head_dim // 2, 2)
    rows = pairs.swapaxes(1, 2).reshape(-1)
    return replace(tensor, rows=rows)
