"""What the attention backends check alike before they touch memory, and the errors they raise.

Knows shapes and dtypes, and nothing of layouts.
"""

import math

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels.apply_rope import check_rope
from octavo_kernels.attention import AttentionMetadata, KVCache, KVCacheShape


def check_kv(shape: KVCacheShape, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Raise ValueError unless k, v and slots can be written to a cache of this shape."""
    sizes = (None, shape.num_kv_heads, shape.head_dim)
    check_tensor("write_kv_cache: k", k, sizes, dtypes=(shape.dtype,), packed=2)
    check_tensor("write_kv_cache: v", v, k.shape, like=k, packed=2)
    check_tensor(
        "write_kv_cache: slot_mapping", slots, k.shape[:1], dtypes=(torch.int64,), beside=k
    )


def check_rope_and_write(
    shape: KVCacheShape,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor | None,
) -> torch.Tensor:
    """Raise ValueError unless `rope_and_write_kv_cache` takes these; return q_out, made if None."""
    q, k, v = qkv
    check_kv(shape, k, v, slots)
    check_rope(q, k, positions, cos_sin)
    if q_out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_tensor("rope_and_write_kv_cache: q_out", q_out, q.shape, like=q, packed=2)
    return q_out


def check_copy(source: KVCache, target: KVCache, pairs: torch.Tensor) -> None:
    """Raise ValueError or IndexError unless `pairs` can be copied from source to target."""
    check_tensor("copy_blocks: pairs", pairs, (None, 2), dtypes=(torch.int64,), packed=2)
    if pairs.device.type != "cpu":
        raise ValueError(f"copy_blocks: pairs are on {pairs.device} but must be on the CPU")
    kinds = [(list(x.storage.shape[1:]), x.storage.dtype) for x in (source, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"copy_blocks: blocks of the target are {kinds[1][0]} of {kinds[1][1]} but must be "
            f"{kinds[0][0]} of {kinds[0][1]} as in the source"
        )
    sizes = [source.num_blocks, target.num_blocks]
    outside = ((pairs < 0) | (pairs >= torch.tensor(sizes))).any(1)
    if outside.any():
        index = int(outside.int().argmax())
        raise IndexError(
            f"copy_blocks: pair {index} is {tuple(pairs[index].tolist())} but the source has "
            f"{sizes[0]} blocks and the target {sizes[1]}"
        )


def check_query(
    shape: KVCacheShape,
    q: torch.Tensor,
    metadata: AttentionMetadata,
    window: int | None,
    out: torch.Tensor | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raise ValueError unless q can read a cache of this shape; return `out`, made if None."""
    check_tensor(
        "paged_attention: q", q, (None, None, shape.head_dim), dtypes=(shape.dtype,), packed=2
    )
    if metadata.seq_lens.device != q.device:  # which the rest of the metadata shares
        raise ValueError(
            f"paged_attention: metadata is on {metadata.seq_lens.device} but must be on {q.device}"
        )
    if q.shape[1] % shape.num_kv_heads:
        raise ValueError(
            f"paged_attention: q has {q.shape[1]} heads but must have a multiple of "
            f"{shape.num_kv_heads}"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window is {window} but must be at least 1 or None")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(
            f"paged_attention: soft_cap is {soft_cap} but must be positive and finite, or None"
        )
    if sinks is not None:
        check_tensor(
            "paged_attention: sinks", sinks, q.shape[1:2], dtypes=(torch.float32,), beside=q
        )
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_tensor("paged_attention: out", out, q.shape, like=q, packed=2)
    return out


def metadata_error(sequence: int, num_tokens: int, num_blocks: int) -> IndexError:
    """Return the error of a sequence whose numbers in the metadata point outside the arrays."""
    return IndexError(
        f"paged_attention: sequence {sequence} has rows or blocks outside the {num_tokens} rows, "
        f"its block table or the cache of {num_blocks} blocks"
    )


def slot_error(name: str, slot: int, num_blocks: int, block_size: int) -> IndexError:
    """Return the error of a slot past the cache."""
    return IndexError(
        f"{name}: slot {slot} is past the cache of {num_blocks} blocks of {block_size}"
    )
