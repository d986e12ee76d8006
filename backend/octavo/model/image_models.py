"""Models that read images beside text, of which the text is served: where a config says what it is.

Such a config has that of a text model in it, and says of that only what differs from what
transformers takes for granted. Knows nothing of files or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.model.config_fields import HARMLESS_FIELDS, ConfigFields

#: They say how images are read and where they stand in a prompt; none changes what text gives.
_IMAGE_FIELDS = frozenset(
    """boi_token_index downsample_ratio eoi_token_index ignore_index image_seq_length image_token_id
    image_token_index mm_tokens_per_image multimodal_projector_bias projector_hidden_act
    spatial_merge_size vision_config vision_feature_layer vision_feature_select_strategy
    vocab_size""".split()
)
#: Where either of two is said, that of the whole model counts.
_OF_BOTH = ("dtype", "eos_token_id", "torch_dtype")


@dataclass(frozen=True, slots=True)
class ImageModel:
    """One model_type of transformers that reads images."""

    architecture: str
    text: tuple[str, ...]
    """What the model_type of its text may be; the first where nothing is said."""


def reads_images(values: Mapping[str, Any]) -> bool:
    """Return whether a config is of a model that reads images, served natively or not."""
    return find_image_model(values) is not None or values.get("vision_config") is not None


def find_image_model(values: Mapping[str, Any]) -> ImageModel | None:
    """Return which of the models that read images a config is of, if of any."""
    name = values.get("model_type")
    return IMAGE_MODELS.get(name) if isinstance(name, str) else None


def text_config(model: ImageModel, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config of the text model that is in the config of one that reads images.

    Args:
        model: that the config is of.
        values: of the config.
        where: what messages call it.

    Raises:
        ConfigError: a field is not understood.
    """
    fields = ConfigFields(values, where)
    fields.choice("model_type", IMAGE_MODELS)
    architectures = fields.raw("architectures")
    if architectures and architectures != [model.architecture]:
        raise fields.error("architectures", architectures, model.architecture)
    own = fields.raw("text_config") or {}
    if not isinstance(own, Mapping):
        raise fields.error("text_config", own, "an object")
    ConfigFields(own, f"text_config of {where}").choice("model_type", model.text, model.text[0])
    text = {"model_type": model.text[0], **own}
    text = {**_DEFAULTS[text["model_type"]], **text}
    text |= {name: fields.raw(name) for name in _OF_BOTH if fields.has(name)}
    if fields.flag("tie_word_embeddings", False):
        text["tie_word_embeddings"] = True
    fields.refuse_the_rest(HARMLESS_FIELDS | _IMAGE_FIELDS)
    return text


#: By model_type.
IMAGE_MODELS = {
    "gemma3": ImageModel("Gemma3ForConditionalGeneration", ("gemma3_text",)),
    "mistral3": ImageModel("Mistral3ForConditionalGeneration", ("mistral",)),
    "llava": ImageModel("LlavaForConditionalGeneration", ("llama", "mistral")),
    "internvl": ImageModel("InternVLForConditionalGeneration", ("qwen2", "qwen3")),
}
#: What transformers takes for granted of a text model, as far as no family has a default for it.
_QWEN2: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
}
