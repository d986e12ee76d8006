"""Tensor operations of Octavo: for each a plain reference and a fast path for its device."""

from octavo_kernels.apply_rope import apply_rope, apply_rope_reference
from octavo_kernels.attention import (
    NO_BLOCK,
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    KVCacheShape,
)
from octavo_kernels.backends import make_attention_backend
from octavo_kernels.gather_blocks import (
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)
from octavo_kernels.gelu_and_mul import gelu_and_mul, gelu_and_mul_reference
from octavo_kernels.linear import linear, linear_reference
from octavo_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from octavo_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

__all__ = [
    "NO_BLOCK",
    "AttentionBackend",
    "AttentionMetadata",
    "KVCache",
    "KVCacheShape",
    "add_rms_norm",
    "add_rms_norm_reference",
    "apply_rope",
    "apply_rope_reference",
    "gather_blocks",
    "gather_blocks_reference",
    "gelu_and_mul",
    "gelu_and_mul_reference",
    "linear",
    "linear_reference",
    "make_attention_backend",
    "rms_norm",
    "rms_norm_reference",
    "scatter_blocks",
    "scatter_blocks_reference",
    "silu_and_mul",
    "silu_and_mul_reference",
]
