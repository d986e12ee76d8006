"""Gather of scattered blocks into one piece, and its inverse: out[i] = storage[block_ids[i]].

Blocks that leave a GPU's memory, or come back, are gathered first, so that one copy moves them all.
Bits are moved, never converted. Knows nothing of what a block holds.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_block_moves
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register


def gather_blocks_reference(storage: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the blocks of storage [num_blocks, ...] that block_ids [count] names, in its order."""
    return storage[block_ids.to(storage.device)]


def gather_blocks(
    storage: torch.Tensor, block_ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy the named blocks of a storage side by side.

    Args:
        storage: [num_blocks, ...], float32, bfloat16 or float16, contiguous.
        block_ids: [count] int64, on the CPU or where storage lies; an id may come twice.
        out: Receives the blocks, [count, ...] like storage, contiguous, apart from it.

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
        IndexError: An id on the CPU is negative or past the storage. Ids on a GPU, which is not
            waited for, are not checked: such a block reads as zeros.
    """
    _check("gather_blocks", storage, block_ids)
    shape = (len(block_ids), *storage.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=storage.dtype, device=storage.device)
    else:
        check_tensor("gather_blocks: out", out, shape, like=storage, packed=storage.dim())
    _gather_blocks(storage, block_ids, out)
    return out


@register("gather_blocks", "Tensor storage, Tensor block_ids, Tensor(a!) out")
def _gather_blocks(storage: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    _check_inside("gather_blocks", storage, block_ids)
    capability = gpu_capability(storage)
    if capability is not None:
        from octavo_kernels._triton.move_blocks import launch_gather_blocks

        ids = _beside(storage, block_ids)
        launch_gather_blocks(storage, ids, out, choose_block_moves(capability))
    elif not _move_natively(storage, out, block_ids, torch.arange(len(block_ids))):
        torch.index_select(storage, 0, block_ids.to(storage.device), out=out)


def scatter_blocks_reference(
    blocks: torch.Tensor, storage: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Write blocks [count, ...] to the places in storage that block_ids [count] names."""
    storage[block_ids.to(storage.device)] = blocks


def scatter_blocks(blocks: torch.Tensor, storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Write blocks that lie side by side to their places in a storage; mutates `storage`.

    Args:
        blocks: [count, ...] like storage, contiguous, apart from it.
        storage: [num_blocks, ...], float32, bfloat16 or float16, contiguous. Mutated: its blocks
            that block_ids names, and no other memory.
        block_ids: [count] int64, on the CPU or where storage lies, no id twice.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or an id on the CPU comes
            twice.
        IndexError: An id on the CPU is negative or past the storage; then nothing is written. Ids
            on a GPU, which is not waited for, are not checked: such a block is written nowhere,
            and of two with one id either may stay.
    """
    _check("scatter_blocks", storage, block_ids)
    shape = (len(block_ids), *storage.shape[1:])
    check_tensor("scatter_blocks: blocks", blocks, shape, like=storage, packed=storage.dim())
    _scatter_blocks(blocks, storage, block_ids)


@register("scatter_blocks", "Tensor blocks, Tensor(a!) storage, Tensor block_ids")
def _scatter_blocks(blocks: torch.Tensor, storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    _check_inside("scatter_blocks", storage, block_ids)
    if block_ids.device.type == "cpu" and len(set(block_ids.tolist())) < len(block_ids):
        raise ValueError("scatter_blocks: block_ids names a block twice but must name each once")
    capability = gpu_capability(storage)
    if capability is not None:
        from octavo_kernels._triton.move_blocks import launch_scatter_blocks

        ids = _beside(storage, block_ids)
        launch_scatter_blocks(blocks, ids, storage, choose_block_moves(capability))
    elif not _move_natively(blocks, storage, torch.arange(len(block_ids)), block_ids):
        storage.index_copy_(0, block_ids.to(storage.device), blocks)


def _check(name: str, storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    if storage.dim() < 2:
        raise ValueError(
            f"{name}: storage has {storage.dim()} dimension(s) but must have 2 or more"
        )
    check_tensor(f"{name}: storage", storage, (None,) * storage.dim(), packed=storage.dim())
    check_tensor(f"{name}: block_ids", block_ids, (None,), dtypes=(torch.int64,))
    if block_ids.device.type != "cpu" and block_ids.device != storage.device:
        raise ValueError(
            f"{name}: block_ids are on {block_ids.device} but must be on the CPU or on "
            f"{storage.device}"
        )


def _check_inside(name: str, storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Raise IndexError unless ids that can be read at once lie in the storage."""
    if block_ids.device.type != "cpu":
        return
    outside = (block_ids < 0) | (block_ids >= len(storage))
    if outside.any():
        index = int(outside.int().argmax())
        raise IndexError(
            f"{name}: block_ids[{index}] is {int(block_ids[index])} but the storage has "
            f"{len(storage)} blocks"
        )


def _beside(storage: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the ids where storage lies; the host waits for no GPU."""
    if storage.device.type == "cuda" and block_ids.device.type == "cpu":
        block_ids = block_ids.pin_memory()  # else the copy may wait for the stream's earlier work
    return block_ids.to(storage.device, non_blocking=True)


def _move_natively(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
) -> bool:
    """Copy whole blocks if native code serves these tensors; say whether it does."""
    library = library_for(source)
    if library is None:
        return False
    if source.numel() > 0:
        pairs = torch.stack((source_ids, target_ids), dim=1)
        library.octavo_copy_blocks(
            *(source.data_ptr(), target.data_ptr(), pairs.data_ptr(), len(pairs)),
            source[0].numel() * source.itemsize,
            torch.get_num_threads(),
        )
    return True
