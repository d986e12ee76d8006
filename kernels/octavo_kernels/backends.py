"""The choice of an attention backend. Knows the backends, and nothing of how they work."""

import torch

from octavo_kernels._choice import gpu_capability, wants_reference
from octavo_kernels.attention import AttentionBackend, KVCacheShape
from octavo_kernels.folded_attention import make_folded_attention
from octavo_kernels.native_attention import make_native_attention
from octavo_kernels.numba_attention import make_numba_attention
from octavo_kernels.reference_attention import ReferenceAttention


def make_attention_backend(shape: KVCacheShape, device: torch.device) -> AttentionBackend:
    """Return the fastest backend that serves a cache of this shape on this device."""
    fast: AttentionBackend | None = None
    if device.type == "cpu":
        fast = _make_cpu_attention(shape)
    elif device.type == "cuda":
        fast = _make_gpu_attention(shape, device)
    return fast or ReferenceAttention(shape, device)


def _make_cpu_attention(shape: KVCacheShape) -> AttentionBackend | None:
    if wants_reference():
        return None
    return (
        make_native_attention(shape) or make_numba_attention(shape) or make_folded_attention(shape)
    )


def _make_gpu_attention(shape: KVCacheShape, device: torch.device) -> AttentionBackend | None:
    capability = gpu_capability(torch.empty(0, device=device))
    if capability is None:
        return None
    # Here, for the rest of the package works without the Triton language.
    from octavo_kernels.triton_attention import make_triton_attention

    return make_triton_attention(shape, device, capability)
