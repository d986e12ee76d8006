"""Shapes of tiny models that read images beside text, and checkpoints with random weights.

Their text parts have the odd sizes of `benchmarks.tiny_models`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.tiny_models import NATIVE, SHAPE
from transformers import AutoConfig, AutoModelForImageTextToText

_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "image_size": 28,
    "patch_size": 14,
}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
#: model_type -> the model_type of its text and what its config has beside it.
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 330},
    ),
    "mistral3": (
        "mistral",
        {"vision_config": {**_VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "llava": ("llama", {"vision_config": {**_VISION, "model_type": "clip_vision_model"}}),
    "internvl": (
        "qwen3",
        {"vision_config": {**_VISION, "model_type": "internvl_vision"}, "image_token_id": 330},
    ),
}


def save_image_model(model_type: str, folder: Path) -> None:
    """Write the checkpoint of one of IMAGES; its weights follow from its place there."""
    torch.manual_seed(list(IMAGES).index(model_type))
    text_type, fields = IMAGES[model_type]
    text = {"model_type": text_type, **SHAPE, **NATIVE[text_type]}
    config = AutoConfig.for_model(model_type, text_config=text, **fields)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # The default initialisation is so small that every logit is nearly the same.
        if "norm" not in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
