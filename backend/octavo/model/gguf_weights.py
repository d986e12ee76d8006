"""The tensors of a GGUF file: renamed, dequantised, rounded to bfloat16, written as safetensors.

Tensors are written one by one, so memory use is that of the largest tensor and not of the model.
Knows nothing of the metadata but the head counts it is given.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, quants
from gguf.gguf_reader import ReaderTensor

from octavo.errors import ConfigError
from octavo.model.gguf_metadata import GgufFile

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def checkpoint_name(gguf_name: str) -> str:
    """Return the transformers name of a GGUF tensor.

    Raises:
        ConfigError: the tensor belongs to no supported model.
    """
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConfigError(
            f"GGUF tensor {gguf_name!r} is not supported; allowed are {', '.join(_TOP_NAMES)} "
            f"and blk.N.X.weight or .bias with X one of {', '.join(_LAYER_NAMES)}"
        )
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def tensor_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its transformers name, in the order of the file.

    Raises:
        ConfigError: a tensor belongs to no supported model, or cannot be dequantised.
    """
    for tensor in file.tensors.values():
        _dequantize(tensor, np.zeros((1, GGML_QUANT_SIZES[tensor.tensor_type][1]), np.uint8))
    return {checkpoint_name(name): file.tensor_shape(name) for name in file.tensors}


def write_safetensors(file: GgufFile, path: Path, paired_heads: dict[str, int]) -> None:
    """Write every tensor of `file` to `path` as bfloat16, under its transformers name.

    Args:
        file: the open GGUF file.
        path: the safetensors file to write.
        paired_heads: for `attn_q` and `attn_k`, the number of heads whose rows llama.cpp stores in
            its interleaved rotary order; empty when the architecture is stored in split halves.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensor_shapes(file).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in file.tensors.values():
            out.write(_bfloat16_bits(tensor, paired_heads))


def _bfloat16_bits(tensor: ReaderTensor, paired_heads: dict[str, int]) -> memoryview:
    values = _dequantize(tensor, tensor.data)
    match = _LAYER_TENSOR.fullmatch(tensor.name)
    if match is not None and match[2] in paired_heads:
        values = split_rotary_halves(values, paired_heads[match[2]])
    return round_to_bfloat16(np.ascontiguousarray(values, dtype=np.float32)).data


def _dequantize(tensor: ReaderTensor, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return data of a tensor's type as float32."""
    try:
        values: npt.NDArray[np.float32] = quants.dequantize(data, tensor.tensor_type)
    except NotImplementedError:
        raise ConfigError(
            f"GGUF tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, "
            "which gguf cannot dequantise; requantise the file"
        ) from None
    return values


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of each value, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Half of what is cut off is added, less one where the kept part is even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    # What stands for no number may have wrapped.
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)


def split_rotary_halves(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Return the rows of each head with the even ones first, then the odd ones.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of the llama architecture; transformers and
    our kernels rotate (i, i + head_dim / 2).

    Args:
        rows: `[num_heads * head_dim, ...]`.
        num_heads: number of heads in `rows`.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
