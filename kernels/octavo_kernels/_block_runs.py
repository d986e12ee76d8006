"""Copies of many blocks as few pieces: which neighbouring pairs one copy moves, in any order kept.

Knows tensors whose first dimension counts blocks, and pairs of block ids; nothing of what a block
holds or of who asks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo_kernels.gather_blocks import gather_blocks, scatter_blocks

# Not measured on a GPU yet. A copy over the bus takes some microseconds to begin, in which it could
# move this many bytes several times: smaller blocks are gathered and go as one.
STAGED_BLOCK_BYTES = 2**20
_STAGE_BYTES = 2**26  # of one gather: device memory that is taken meanwhile


class Run(NamedTuple):
    """Pairs (source + i, target + i) for i below length."""

    source: int
    target: int
    length: int


def neighbouring_runs(pairs: list[tuple[int, int]], *, one_memory: bool) -> Iterator[Run]:
    """Yield the longest runs that move the same bits as the pairs one after the other.

    With `one_memory`, sources and targets are blocks of one storage: then a run ends before it
    would read what it writes.
    """
    if not pairs:
        return
    (source, target), length = pairs[0], 1
    for pair in pairs[1:]:
        apart = not one_memory or abs(source - target) > length
        if pair == (source + length, target + length) and apart:
            length += 1
        else:
            yield Run(source, target, length)
            (source, target), length = pair, 1
    yield Run(source, target, length)


def staged_stretches(
    pairs: list[tuple[int, int]], host: int, most: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs in stretches that one copy over the bus can move.

    In a stretch the ids on the host, `pair[host]`, follow each other, no block of the device comes
    twice, and there are at most `most` pairs.
    """
    stretch: list[tuple[int, int]] = []
    on_device: set[int] = set()
    for pair in pairs:
        follows = bool(stretch) and pair[host] == stretch[-1][host] + 1
        if stretch and (not follows or len(stretch) == most or pair[1 - host] in on_device):
            yield stretch
            stretch, on_device = [], set()
        stretch.append(pair)
        on_device.add(pair[1 - host])
    if stretch:
        yield stretch


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy checked pairs of blocks, neighbours at once; mutates `target`, waits for no GPU."""
    one_memory = source.data_ptr() == target.data_ptr()
    for run in neighbouring_runs(pairs, one_memory=one_memory):
        blocks = source[run.source : run.source + run.length]
        target[run.target : run.target + run.length].copy_(blocks, non_blocking=True)


def copy_staged(
    source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]], *, out: bool
) -> None:
    """Copy checked pairs between a device and the host; mutates `target`, waits for no GPU.

    Scattered blocks of the device whose places on the host follow each other are gathered in a
    buffer on the device and go as one; with `out` they leave the device, else they come to it.
    """
    block_bytes = max(1, source[:1].numel() * source.itemsize)
    host = 1 if out else 0
    for stretch in staged_stretches(pairs, host, max(1, _STAGE_BYTES // block_bytes)):
        device_ids = [pair[1 - host] for pair in stretch]
        if device_ids == list(range(device_ids[0], device_ids[0] + len(stretch))):
            copy_runs(source, target, stretch)
            continue
        begin, end = stretch[0][host], stretch[-1][host] + 1
        ids = torch.tensor(device_ids, dtype=torch.int64)
        if out:
            target[begin:end].copy_(gather_blocks(source, ids), non_blocking=True)
        else:
            stage = source[begin:end].to(target.device, non_blocking=True)
            scatter_blocks(stage, target, ids)
