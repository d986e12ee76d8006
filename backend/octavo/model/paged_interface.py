"""Paged attention as transformers' attention interface calls it.

Every module of a model that calls it holds the model's own `StepSlot`: some architectures pass on
no arguments of a step, and two models in one process have nothing in common. Knows what a call
says, and nothing of architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from octavo_kernels import AttentionBackend, AttentionMetadata, KVCache

#: What a config names to have its model call `paged_attention_forward`. No mask function goes by
#: this name, so transformers builds no mask.
PAGED = "octavo_paged"
#: The attribute of an attention module that holds the slot.
_SLOT = "octavo_step_slot"


@dataclass(frozen=True, slots=True)
class Step:
    """Where the keys and values of one step go and lie."""

    kv_cache: KVCache
    metadata: AttentionMetadata


class StepSlot:
    """What one model's attention modules share: its backend, and the step that is under way.

    Args:
        attention: of the model.
        windows: per layer, how many last tokens a token sees; None for all.
    """

    def __init__(self, attention: AttentionBackend, windows: tuple[int | None, ...]) -> None:
        self.attention = attention
        self.windows = windows
        self.step: Step | None = None

    def give_to(self, model: torch.nn.Module) -> None:
        """Let every module of a model that may call attention find this slot."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self)

    @contextmanager
    def holding(self, step: Step) -> Iterator[None]:
        """Have attention read and write this step's keys and values."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write a layer's new keys and values into their blocks, and attend to all of their sequences.

    What else a call may say was looked at when the model was traced.

    Args:
        module: the caller; its `layer_idx` says which layer it is.
        query: [1, heads, num_tokens, head_dim]
        key: [1, kv_heads, num_tokens, head_dim]
        value: like key.
        attention_mask: None.
        scaling: factor of the scores; by default head_dim ** -0.5.
        softcap: bound of the scores.
        s_aux: [heads], a logit of each head that has no value.

    Returns:
        [1, num_tokens, heads, head_dim], and no weights.
    """
    slot: StepSlot = getattr(module, _SLOT)
    assert slot.step is not None, "attention is only called in a step"
    assert attention_mask is None, "no mask is built for this attention"
    layer: int = module.__dict__["layer_idx"]
    cache, metadata = slot.step.kv_cache, slot.step.metadata
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    slot.attention.write_kv_cache(k, v, cache, layer, metadata.slot_mapping)
    attended = slot.attention.paged_attention(
        q,
        cache,
        layer,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=slot.windows[layer],
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return attended.unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention_forward)
