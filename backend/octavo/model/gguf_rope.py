"""How a GGUF file says that queries and keys are rotated, as transformers says it.

Where llama.cpp's converter has scaled frequencies itself, they lie in tensors. Knows nothing of
architectures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from octavo.errors import ConfigError, shown
from octavo.model.gguf_metadata import GgufFile

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that hold no weights, but factors of wavelengths."""


def read_rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the `rope_parameters` of a file: of the layers without a window, where some have one.

    Raises:
        ConfigError: what it says is not supported.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.number(".rope.freq_base", 10_000.0),
    }
    dim = file.integer(".rope.dimension_count", head_dim)
    if dim != head_dim:
        part = dim / max(head_dim, 1)
        # transformers multiplies again, and cuts off.
        if int(head_dim * part) != dim:
            raise ConfigError(f"GGUF metadata rotates {dim} of a head's {head_dim} entries")
        rope["partial_rotary_factor"] = part
    kind = file.text(".rope.scaling.type", "none")
    found = [name for name in ROPE_TENSORS if name in file.tensors]
    if kind in ("none", "longrope") and found == list(ROPE_TENSORS[1:]):
        return rope | _long(file)
    if kind == "none" and found == [ROPE_TENSORS[0]]:
        factors = _factors(file, ROPE_TENSORS[0])
        whole = {"attention_factor": 1.0, "factor": 1.0}
        context = file.integer(".context_length")
        return rope | whole | _longrope(factors, factors, context)
    if found or kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"GGUF rope scaling {kind!r} with tensors {found} is not supported; allowed are none, "
            f"linear and yarn without such tensors, and none with {ROPE_TENSORS[0]}, or none and "
            f"longrope with {' and '.join(ROPE_TENSORS[1:])}"
        )
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": file.number(".rope.scaling.factor")}
    return rope | (_yarn(file, rope["factor"]) if kind == "yarn" else {})


def _long(file: GgufFile) -> dict[str, Any]:
    short, long = (_factors(file, name) for name in ROPE_TENSORS[1:])
    original = file.integer(".rope.scaling.original_context_length")
    attention = file.number(".rope.scaling.attn_factor")
    return {"attention_factor": attention, **_longrope(short, long, original)}


def _longrope(short: list[float], long: list[float], original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    extrapolation = file.number(".rope.scaling.yarn_ext_factor", 1.0)
    attention = file.number(".rope.scaling.yarn_attn_factor", None)
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    # llama.cpp overlooks another one, so nobody can tell what a file means by it.
    if extrapolation != 1.0 or not math.isclose(usual if attention is None else attention, usual):
        raise ConfigError(
            f"GGUF yarn factors {shown(extrapolation)} and {shown(attention)} are not supported; "
            f"allowed are yarn_ext_factor 1.0 and yarn_attn_factor {usual}"
        )
    return {
        "original_max_position_embeddings": file.integer(".rope.scaling.original_context_length"),
        "beta_fast": file.number(".rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.number(".rope.scaling.yarn_beta_slow", 1.0),
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.kind != GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise ConfigError(f"GGUF tensor {name!r} must be a row of F32")
    return [float(str(value)) for value in tensor.data.view(np.float32)]
