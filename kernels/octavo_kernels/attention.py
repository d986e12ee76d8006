"""Paged attention: the data it takes, the interface of its backends, and the choice of one.

A backend owns the layout of the KV cache, its write and its read; callers see block ids and slots
only. Knows nothing of sequences, scheduling or models.

Whatever the backend, the result of a query row depends, to the bit, on its own query and on the
keys and values at its own position and before it: not on the other rows of the batch, the split of
a prompt into chunks, the block size, or what unused slots and later tokens hold (even NaN). Between
backends, and between the instruction sets of one backend, bits may differ.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo_kernels._check import FLOAT_DTYPES, check_tensor

NO_BLOCK = -1
"""Stands in a block table for a block that no row of the step sees."""


@dataclass(frozen=True)
class KVCacheShape:
    """What the KV cache of a model holds, whatever its layout."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be at least 1")
        if self.dtype not in FLOAT_DTYPES:
            allowed = " or ".join(map(str, FLOAT_DTYPES))
            raise ValueError(f"dtype is {self.dtype} but must be {allowed}")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values over all layers."""
        elements = self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return 2 * elements * self.dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """The memory of one cache; only the backend that made it knows its layout inside a block.

    The first dimension of every tensor counts blocks.
    """

    storage: torch.Tensor
    """[num_blocks, ...] contiguous: a block is one piece, the keys and values of all layers."""
    keys: tuple[torch.Tensor, ...]
    """One view of `storage` a layer."""
    values: tuple[torch.Tensor, ...]
    """One view of `storage` a layer."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.storage.shape[0]


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rows of one step lie and which blocks they may read and write.

    Sequence i owns the rows query_start_loc[i] up to query_start_loc[i + 1] of q. They are its last
    tokens: the last row has position seq_lens[i] - 1. Its position p is in block
    block_tables[i, p // block_size]; entries past its length may hold anything, and entries before
    the window of its first row may be NO_BLOCK, which changes no bit.

    Raises:
        ValueError: A shape or dtype is not as documented, or not all tensors are on one device.
    """

    query_start_loc: torch.Tensor
    """[num_seqs + 1] int32, rising from 0."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: tokens whose keys and values exist after this step's write."""
    block_tables: torch.Tensor
    """[num_seqs, max_blocks] int32, contiguous."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64: block_id * block_size + offset of each row, -1 writes nowhere."""
    max_query_len: int
    """Most rows of one sequence."""
    max_seq_len: int
    """Largest of seq_lens."""

    def __post_init__(self) -> None:
        lens, num_seqs = self.seq_lens, self.seq_lens.shape[0]
        for name, tensor, shape, dtype, packed in (
            ("query_start_loc", self.query_start_loc, (num_seqs + 1,), torch.int32, 1),
            ("seq_lens", lens, (num_seqs,), torch.int32, 1),
            ("block_tables", self.block_tables, (num_seqs, None), torch.int32, 2),
            ("slot_mapping", self.slot_mapping, (None,), torch.int64, 1),
        ):
            check_tensor(name, tensor, shape, dtypes=(dtype,), beside=lens, packed=packed)


class AttentionBackend(Protocol):
    """Owner of the KV cache's layout, its write and its read."""

    name: str
    """Short name for logs."""
    shape: KVCacheShape
    recordable: bool
    """Whether a graph can record its work: on a GPU, the host never reads what the device holds."""

    def allocate(self, num_blocks: int, *, host: bool = False) -> KVCache:
        """Return a zero-filled cache of `num_blocks` blocks for every layer.

        Args:
            num_blocks: Blocks, 0 or more.
            host: Take CPU memory, whatever the device: pinned where the device is CUDA. Only
                `copy_blocks` reads and writes such a cache, except where the device is the CPU.
        """
        ...

    def copy_blocks(self, source: KVCache, target: KVCache, pairs: torch.Tensor) -> None:
        """Copy whole blocks, all layers' keys and values, one pair after the other.

        A block that one pair writes and a later one reads is copied on as written. On CUDA the
        copies join the current stream and this returns before they are done. Not an operation that
        a compiled graph can hold: the host reads `pairs`, and a graph keeps `source` as it was
        before, though it may be the target.

        Args:
            source: What `allocate` returned.
            target: What `allocate` returned, on any device, of any number of blocks; may be
                `source`. Mutated.
            pairs: [num_pairs, 2] int64 on the CPU, contiguous: source block, target block.

        Raises:
            ValueError: `pairs` is not as above, or the caches' blocks differ in shape or dtype.
            IndexError: A pair lies outside the caches; then nothing has been copied.
        """
        ...

    def write_kv_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the keys and values of some tokens into their slots of one layer; mutates `cache`.

        Args:
            k: [num_tokens, num_kv_heads, head_dim] of the cache's dtype; tokens may be strided.
            v: Like k.
            cache: What `allocate` returned.
            layer: Index of the layer.
            slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 writes nowhere.

        Raises:
            ValueError: A shape, dtype, device or stride is not as above.
            IndexError: A slot lies past the cache; on a GPU, which is not waited for, it writes
                nowhere instead.
        """
        ...

    def rope_and_write_kv_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: KVCache,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        q_out: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate queries and keys by their positions, and write keys and values; mutates `cache`.

        The bits are those of `apply_rope` and then `write_kv_cache`, but the rotated keys go
        nowhere but into the cache.

        Args:
            q: [num_tokens, q_heads, head_dim] of the cache's dtype; tokens may be strided.
            k: [num_tokens, num_kv_heads, head_dim], likewise.
            v: Like k.
            positions: [num_tokens] int64, as `apply_rope` takes them, also where the slot is -1.
            cos_sin: [max_len, rotary_dim] float32, as `apply_rope` takes it.
            cache: What `allocate` returned.
            layer: Index of the layer.
            slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 writes nowhere.
            q_out: Receives the rotated q; may be q.
            interleaved: Whether pairs lie side by side; else in two halves.

        Returns:
            q rotated, in `q_out` or in a new contiguous tensor.

        Raises:
            ValueError: A shape, dtype, device or stride is not as above.
            IndexError: A position is outside the table, or a slot past the cache; then nothing has
                been written. On a GPU, which is not waited for, the token's q and key become NaN,
                and such a slot writes nowhere.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each row to the keys of its sequence up to its own position.

        Softmax and sums are in float32. Query head h reads KV head
        h // (q_heads // num_kv_heads).

        Args:
            q: [num_tokens, q_heads, head_dim] of the cache's dtype; tokens may be strided.
            cache: What `allocate` returned, with this step's keys and values written.
            layer: Index of the layer.
            metadata: Where rows and blocks lie. NO_BLOCK may stand for a block whose positions
                all lie before the first one that any row of its sequence sees, and for no other.
            scale: Factor of the scores.
            window: Positions that a row sees, its own included; None for all.
            soft_cap: Bound of the scores: after `scale`, a score s becomes
                soft_cap * tanh(s / soft_cap). None leaves them as they are.
            sinks: [q_heads] float32: for each head one more logit in the sum below the fraction of
                the softmax, with no value above it. None for none.
            out: Receives the result, shape and dtype of q, apart from q.

        Returns:
            `out`, or a new contiguous tensor like q; rows of no sequence are not written.

        Raises:
            ValueError: A shape, dtype, device, stride or number is not as above.
            IndexError: The numbers in `metadata` point outside q, block_tables or the cache; on a
                GPU, which is not waited for, such blocks read as zeros instead.
        """
        ...
