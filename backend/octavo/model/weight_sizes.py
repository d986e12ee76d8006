"""What the native decoder's weights take, known from a spec before any of them is read.

Knows nothing of files.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from octavo.model import tensor_names as names
from octavo.model.expert_names import expert_names
from octavo.model.layers import packed_bytes
from octavo.model.shard import ModelPart

_LAYERS = names.layer_prefix(0).removesuffix("0.")


def part_bytes(part: ModelPart, dtype: torch.dtype, *, of_8_bits: bool) -> int:
    """Return what a rank's weights take, but for the padding of packed ones.

    Args:
        part: what the rank holds.
        dtype: of the weights; norms are float32.
        of_8_bits: whether linear layers are of 8 bits.
    """
    spec = replace(part.spec, vocab_size=len(part.tokens))
    shapes = names.expected_tensors(spec)
    embedding = shapes.pop(names.EMBEDDING)
    is_first, is_last = part.shard.is_first_stage, part.shard.is_last_stage
    total = math.prod(embedding) * dtype.itemsize if is_first else 0
    if spec.tied_embeddings and is_last and (of_8_bits or not is_first):
        total += packed_bytes(embedding, dtype, of_8_bits=of_8_bits)
    if not is_last:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(_LAYERS)}
    return total + sum(_tensor_bytes(part, *item, dtype, of_8_bits) for item in shapes.items())


def _tensor_bytes(
    part: ModelPart, name: str, shape: tuple[int, ...], dtype: torch.dtype, of_8_bits: bool
) -> int:
    if "norm" in name:
        return math.prod(shape) * torch.float32.itemsize
    if name.endswith(".bias"):
        # Of products that are summed over ranks one rank adds it.
        is_summed = name.endswith((f"{names.OUT}.bias", f"{names.DOWN}.bias"))
        return 0 if is_summed and part.shard.tp_rank else math.prod(shape) * dtype.itemsize
    experts = part.spec.experts
    is_router = experts is not None and name.endswith(f"{expert_names(experts).router}.weight")
    return packed_bytes(shape, dtype, of_8_bits=of_8_bits and not is_router)
