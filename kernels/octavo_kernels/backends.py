"""The choice of an attention backend. Knows the backends, and nothing of how they work."""

import torch

from octavo_kernels.attention import AttentionBackend, KVCacheShape
from octavo_kernels.native_attention import make_native_attention
from octavo_kernels.reference_attention import ReferenceAttention


def make_attention_backend(shape: KVCacheShape, device: torch.device) -> AttentionBackend:
    """Return the fastest backend that serves a cache of this shape on this device."""
    native = make_native_attention(shape) if device.type == "cpu" else None
    return native or ReferenceAttention(shape, device)
