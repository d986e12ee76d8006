"""From a transformers config to a `ModelSpec`: the table of families, and what all read alike.

A field that nobody takes is an error unless it is known to be harmless, and so is a value that
is not understood: nothing is guessed. Knows nothing of files, tensors or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError, shown
from octavo.model import family_fields as read
from octavo.model.config_bounds import MOST_LAYERS
from octavo.model.config_fields import HARMLESS_FIELDS, ConfigFields
from octavo.model.image_models import IMAGE_MODELS, find_image_model, text_config
from octavo.model.layer_kinds import Sizes
from octavo.model.spec import ModelSpec

_DTYPES = ("bfloat16", "float16", "float32")
_WHERE = "the model config"
#: Far beyond any model: what a config says is reserved before a tensor shows whether it is true.
_MOST_POSITIONS = 2**27


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of transformers."""

    architecture: str
    """The one of it that generates text here."""
    read: Callable[[ConfigFields, Sizes], dict[str, Any]]
    """Takes the fields that only this family has, or reads so; returns fields of ModelSpec."""
    derives_kv_heads: bool = False
    """Without num_key_value_heads there are as many as query heads."""
    derives_head_dim: bool = True
    """Without head_dim it is hidden_size / num_attention_heads."""
    ties_embeddings: bool = False
    """What tie_word_embeddings is where it is absent."""


def spec_from_config(config: Mapping[str, Any] | Any) -> ModelSpec:
    """Read a transformers config: the JSON object, or the object with `to_dict()`.

    Raises:
        ConfigError: the architecture, a field or a value is not supported or not understood.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    refuse_quantized(values)
    image_model = find_image_model(values)
    if image_model is None:
        return _text_spec(values)
    text = text_config(image_model, values, _WHERE)
    refuse_quantized(text)
    return replace(_text_spec(text), architecture=image_model.architecture, is_text_part=True)


def _text_spec(values: Mapping[str, Any]) -> ModelSpec:
    fields = ConfigFields(values, _WHERE)
    family = _family(fields)
    sizes = _sizes(fields, family)
    common = {
        "architecture": family.architecture,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_layers": sizes.num_layers,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_len,
        "attention_scale": sizes.head_dim**-0.5,
        "tied_embeddings": fields.flag("tie_word_embeddings", family.ties_embeddings),
        "eos_token_ids": read_token_ids(fields.raw("eos_token_id")),
        "dtype": _dtype(fields),
    }
    spec = ModelSpec(**{**common, **family.read(fields, sizes)})
    fields.refuse_the_rest(HARMLESS_FIELDS)
    return spec


def refuse_quantized(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a transformers config says that weights are quantized."""
    for key in ("quantization_config", "compression_config"):
        quantization = values.get(key)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise ConfigError(
                f"the checkpoint is quantized ({shown(method or quantization)} in {key}), which "
                "is not supported; use bfloat16, float16 or float32 weights, or a GGUF file"
            )


def read_token_ids(value: Any) -> tuple[int, ...]:
    """Return an `eos_token_id` field, which is null, one id or a list of ids, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{_WHERE} has eos_token_id = {value!r} but must have token ids")
    return tuple(ids)


def _family(fields: ConfigFields) -> Family:
    architectures = fields.raw("architectures")
    family = FAMILIES[fields.choice("model_type", (*FAMILIES, *IMAGE_MODELS))]
    if architectures and architectures != [family.architecture]:
        raise fields.error("architectures", architectures, family.architecture)
    return family


def _sizes(fields: ConfigFields, family: Family) -> Sizes:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    # Only what follows from other fields is a default; elsewhere it is an arbitrary number.
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if family.derives_kv_heads else None
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})"
        )
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error(
            "hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})"
        )
    derived = hidden_size // num_heads if family.derives_head_dim else None
    return Sizes(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", derived),
        max_len=fields.integer("max_position_embeddings", most=_MOST_POSITIONS),
    )


def _dtype(fields: ConfigFields) -> str | None:
    older, newer = fields.raw("torch_dtype"), fields.raw("dtype")
    value = older if newer is None else newer
    name = None if value is None else str(value).removeprefix("torch.")
    if name is not None and name not in _DTYPES:
        raise fields.error("dtype", value, "one of " + ", ".join(_DTYPES))
    return name


#: By model_type.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", read.llama, derives_kv_heads=True),
    "mistral": Family("MistralForCausalLM", read.mistral),
    "smollm3": Family("SmolLM3ForCausalLM", read.smollm3, ties_embeddings=True),
    "qwen2": Family("Qwen2ForCausalLM", read.qwen2),
    "qwen3": Family("Qwen3ForCausalLM", read.qwen3, derives_head_dim=False),
    "phi3": Family("Phi3ForCausalLM", read.phi3, derives_kv_heads=True),
    "gemma": Family("GemmaForCausalLM", read.gemma, derives_head_dim=False, ties_embeddings=True),
    "gemma2": Family(
        "Gemma2ForCausalLM", read.gemma2, derives_head_dim=False, ties_embeddings=True
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", read.gemma3, derives_head_dim=False, ties_embeddings=True
    ),
    "granite": Family("GraniteForCausalLM", read.granite, derives_kv_heads=True),
    "olmo2": Family("Olmo2ForCausalLM", read.olmo2, derives_kv_heads=True),
    "olmo3": Family("Olmo3ForCausalLM", read.olmo3, derives_kv_heads=True),
    "mixtral": Family("MixtralForCausalLM", read.mixtral),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", read.qwen3_moe),
    "olmoe": Family("OlmoeForCausalLM", read.olmoe, derives_kv_heads=True),
    "stablelm": Family("StableLmForCausalLM", read.stablelm),
}
