"""Which features a model does without in each way of being served, and why.

Knows nothing of memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.config import EngineConfig
from octavo.model.quantization import QUANTIZED, quantization_refusal
from octavo.model.spec import ModelSpec
from octavo.model_check.report import FeatureOff
from octavo.static_engine.refusals import BEAMS, OPTIONS

#: What batches of whole requests do without, whatever is asked for; they refuse more.
_STATIC = {
    "paged KV": "batches of whole requests run, each with a cache of transformers' own",
    "requests that join at every step": "who comes later waits until the batch has ended",
    "prefix cache": "no cache outlives its batch",
    "chunks of prompts": "a prompt is computed whole",
}


def features_off(
    config: EngineConfig,
    tier: str,
    dtype: torch.dtype,
    device: torch.device,
    spec: ModelSpec | None = None,
    *,
    reads_images: bool,
) -> tuple[FeatureOff, ...]:
    """Return what is off.

    Args:
        config: the options.
        tier: the way the model is served in.
        dtype: of the weights.
        device: where it computes.
        spec: of a native model.
        reads_images: whether the whole model does, beside text.
    """
    images = _images_off(tier) if reads_images else ()
    pairs = _static_off() if tier == "static" else _paged_off(config, tier, dtype, device, spec)
    return tuple(FeatureOff(*pair) for pair in (*images, *pairs))


def _images_off(tier: str) -> Iterator[tuple[str, str]]:
    left_out = "; what reads images is left out" if tier == "native" else ""
    yield "images", f"text alone is served{left_out}"


def _static_off() -> Iterator[tuple[str, str]]:
    yield from _STATIC.items()
    yield from {each.feature: each.reason for each in (*OPTIONS, BEAMS)}.items()


def _not_native() -> Iterator[tuple[str, str]]:
    yield "several ranks", "they take the native decoder"
    yield "LoRA", "adapters take the native decoder"


def _paged_off(
    config: EngineConfig,
    tier: str,
    dtype: torch.dtype,
    device: torch.device,
    spec: ModelSpec | None,
) -> Iterator[tuple[str, str]]:
    if tier != "native":
        yield from _not_native()
    if spec is not None and spec.experts is not None:
        yield "LoRA of experts", "adapters change attention and plain MLPs"
    for name in QUANTIZED:
        reason = quantization_refusal(name, dtype, device)
        if reason is not None:
            yield name, f"it {reason}"
    if device.type == "cuda" and (tier != "native" or config.num_ranks > 1):
        why = "several GPUs exchange results" if tier == "native" else "transformers' modules run"
        yield "CUDA graphs", f"{why} within a step"
