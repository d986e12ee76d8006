"""`ModelSpec`: every number the decoder needs, read from a transformers config without guessing.

Knows the Llama family (Llama, Mistral, SmolLM, Qwen2, Qwen3) and where its members differ. Knows
nothing of files, tensors or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.model.config_fields import HARMLESS_FIELDS, ConfigFields
from octavo.model.rope import RopeSpec

#: model_type -> the one architecture of it that generates text here.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = ("bfloat16", "float16", "float32")
_WHERE = "the model config"
#: Far beyond any model: what a config says is reserved before a tensor shows whether it is true.
_MOST_LAYERS = 4096
_MOST_POSITIONS = 2**27


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """Per layer: how many last tokens, its own included, a token attends to; None for all."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before the rotation."""
    tied_embeddings: bool
    """The vocabulary projection is the embedding table."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The dtype the config names, `bfloat16`, `float16` or `float32`."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | Any) -> ModelSpec:
        """Read a transformers config: the JSON object, or the object with `to_dict()`.

        Raises:
            ConfigError: the architecture, a field or a value is not supported or not understood.
        """
        values = config if isinstance(config, Mapping) else config.to_dict()
        if values.get("quantization_config"):
            raise ConfigError(
                "the checkpoint is quantized (quantization_config), which is not supported; "
                "use bfloat16, float16 or float32 weights, or a GGUF file"
            )
        fields = ConfigFields(values, _WHERE)
        model_type = _model_type(fields)
        num_layers = fields.integer("num_hidden_layers", most=_MOST_LAYERS)
        max_len = fields.integer("max_position_embeddings", most=_MOST_POSITIONS)
        fields.choice("hidden_act", ("silu",), "silu")
        hidden_size, num_heads, num_kv_heads, head_dim = _head_sizes(fields, model_type)
        spec = cls(
            architecture=ARCHITECTURES[model_type],
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=max_len,
            rope=_rope(fields, head_dim, max_len),
            windows=_windows(fields, model_type, num_layers),
            **_biases(fields, model_type),
            qk_norm=model_type == "qwen3",
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=read_token_ids(fields.raw("eos_token_id")),
            dtype=_dtype(fields),
        )
        fields.refuse_the_rest(HARMLESS_FIELDS)
        return spec


def read_token_ids(value: Any) -> tuple[int, ...]:
    """Return an `eos_token_id` field, which is null, one id or a list of ids, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{_WHERE} has eos_token_id = {value!r} but must have token ids")
    return tuple(ids)


def _model_type(fields: ConfigFields) -> str:
    architectures = fields.raw("architectures")
    model_type = fields.choice("model_type", ARCHITECTURES)
    if architectures and architectures != [ARCHITECTURES[model_type]]:
        raise fields.error("architectures", architectures, ARCHITECTURES[model_type])
    return model_type


def _head_sizes(fields: ConfigFields, model_type: str) -> tuple[int, int, int, int]:
    """Return (hidden_size, num_heads, num_kv_heads, head_dim)."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    # Only Llama's own default follows from other fields; elsewhere it is an arbitrary number.
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if model_type == "llama" else None
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})"
        )
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error(
            "hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})"
        )
    derived = None if model_type == "qwen3" else hidden_size // num_heads
    return hidden_size, num_heads, num_kv_heads, fields.integer("head_dim", derived)


def _rope(fields: ConfigFields, head_dim: int, max_len: int) -> RopeSpec:
    # The older field wins where both stand, as in transformers.
    parameters = fields.raw("rope_parameters") or {}
    parameters = fields.raw("rope_scaling") or parameters
    if not isinstance(parameters, Mapping):
        raise fields.error("rope_parameters", parameters, "an object")
    return RopeSpec.from_fields(parameters, head_dim, fields.optional_number("rope_theta"), max_len)


def _biases(fields: ConfigFields, model_type: str) -> dict[str, bool]:
    if model_type == "qwen2":
        return {"qkv_bias": True, "o_bias": False, "mlp_bias": False}
    if model_type == "mistral":
        return {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    bias = fields.flag("attention_bias", False)
    mlp_bias = model_type == "llama" and fields.flag("mlp_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}


def _windows(fields: ConfigFields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    if model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        # Absent is not null: transformers reads an absent field of this family as 4096.
        window = fields.raw("sliding_window", 4096)
        return (_checked_window(fields, window) if window is not None else None,) * num_layers
    window = fields.raw("sliding_window")
    layer_types = fields.raw("layer_types")
    window = _checked_window(fields, window) if fields.flag("use_sliding_window", False) else None
    if layer_types is None:
        first = fields.integer("max_window_layers") if window is not None else num_layers
        layer_types = [
            "full_attention" if i < first else "sliding_attention" for i in range(num_layers)
        ]
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    if len(layer_types) != num_layers or any(kind not in kinds for kind in layer_types):
        raise fields.error(
            "layer_types", layer_types, f"{num_layers} times one of {', '.join(kinds)}"
        )
    return tuple(kinds[kind] for kind in layer_types)


def _checked_window(fields: ConfigFields, window: Any) -> int:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise fields.error("sliding_window", window, "a positive integer")
    return window


def _dtype(fields: ConfigFields) -> str | None:
    older, newer = fields.raw("torch_dtype"), fields.raw("dtype")
    value = older if newer is None else newer
    name = None if value is None else str(value).removeprefix("torch.")
    if name is not None and name not in _DTYPES:
        raise fields.error("dtype", value, "one of " + ", ".join(_DTYPES))
    return name
