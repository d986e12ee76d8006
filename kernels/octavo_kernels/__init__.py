"""Tensor operations of Octavo: for each a plain reference and a fast path for its device."""

from octavo_kernels._logits import Penalties, SamplingRows
from octavo_kernels.apply_penalties import apply_penalties, apply_penalties_reference
from octavo_kernels.apply_rope import apply_rope, apply_rope_reference
from octavo_kernels.apply_token_bitmask import (
    apply_token_bitmask,
    apply_token_bitmask_reference,
)
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
from octavo_kernels.greedy import greedy, greedy_reference
from octavo_kernels.grouped_linear import grouped_linear, grouped_linear_reference
from octavo_kernels.int8_linear import int8_linear_reference
from octavo_kernels.layer_norm import layer_norm, layer_norm_reference
from octavo_kernels.layer_parts import LayerLowRanks, LayerParts, SharedParts
from octavo_kernels.linear import linear, linear_reference
from octavo_kernels.low_rank import (
    LowRankTable,
    PackedLowRank,
    low_rank_add_,
    low_rank_add_reference,
)
from octavo_kernels.native_layers import NativeLayers, make_native_layers
from octavo_kernels.packed_embedding import packed_embedding
from octavo_kernels.packed_groups import (
    PackedGroups,
    make_packed_groups,
    pack_group,
    packed_grouped_linear,
    packed_grouped_silu,
)
from octavo_kernels.packed_linear import (
    PackedWeight,
    pack_weight,
    packed_linear,
    packs_weights,
)
from octavo_kernels.quantization import quantize_weight, quantized_types
from octavo_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from octavo_kernels.sample import sample, sample_reference
from octavo_kernels.shared_exchange import (
    SharedExchange,
    exchanges_in_memory,
    sum_in_order_reference,
)
from octavo_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from octavo_kernels.token_logprobs import token_logprobs, token_logprobs_reference
from octavo_kernels.top_logprobs import TopLogprobs, top_logprobs, top_logprobs_reference
from octavo_kernels.weighted_sum import weighted_sum, weighted_sum_reference

__all__ = [
    "NO_BLOCK",
    "AttentionBackend",
    "AttentionMetadata",
    "KVCache",
    "KVCacheShape",
    "LayerLowRanks",
    "LayerParts",
    "LowRankTable",
    "NativeLayers",
    "PackedGroups",
    "PackedLowRank",
    "PackedWeight",
    "Penalties",
    "SamplingRows",
    "SharedExchange",
    "SharedParts",
    "TopLogprobs",
    "add_rms_norm",
    "add_rms_norm_reference",
    "apply_penalties",
    "apply_penalties_reference",
    "apply_rope",
    "apply_rope_reference",
    "apply_token_bitmask",
    "apply_token_bitmask_reference",
    "exchanges_in_memory",
    "gather_blocks",
    "gather_blocks_reference",
    "gelu_and_mul",
    "gelu_and_mul_reference",
    "greedy",
    "greedy_reference",
    "grouped_linear",
    "grouped_linear_reference",
    "int8_linear_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear",
    "linear_reference",
    "low_rank_add_",
    "low_rank_add_reference",
    "make_attention_backend",
    "make_native_layers",
    "make_packed_groups",
    "pack_group",
    "pack_weight",
    "packed_embedding",
    "packed_grouped_linear",
    "packed_grouped_silu",
    "packed_linear",
    "packs_weights",
    "quantize_weight",
    "quantized_types",
    "rms_norm",
    "rms_norm_reference",
    "sample",
    "sample_reference",
    "scatter_blocks",
    "scatter_blocks_reference",
    "silu_and_mul",
    "silu_and_mul_reference",
    "sum_in_order_reference",
    "token_logprobs",
    "token_logprobs_reference",
    "top_logprobs",
    "top_logprobs_reference",
    "weighted_sum",
    "weighted_sum_reference",
]
