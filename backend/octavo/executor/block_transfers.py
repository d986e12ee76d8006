"""Block copies between device and host in the order that a step needs them.

`BlockCopies` says what is copied, the attention backend copies, and this module orders. Knows
nothing of sequences or of why blocks move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch

from octavo.cache.block_copies import BlockCopies, BlockPair
from octavo_kernels import AttentionBackend, KVCache


class BlockTransfers(Protocol):
    """Maker of the copies of each step."""

    def start(self, copies: BlockCopies) -> None:
        """Make a step's copies, in the order that `BlockCopies` documents.

        On return the forward pass may be started: it sees everything but the swap-ins, which may
        still be under way. Mutates both caches.
        """

    def arrived(self) -> tuple[int, ...]:
        """Return the transfer ids of swap-ins that are done, each once, in the order of start."""

    def wait(self) -> None:
        """Return when `arrived` has something to tell, or at once if no swap-in is under way."""


class DirectTransfers:
    """Make each copy when it is asked for; for a device whose memory is the host's."""

    def __init__(self, attention: AttentionBackend, device: KVCache, host: KVCache) -> None:
        self._attention = attention
        self._device = device
        self._host = host
        self._arrived: list[int] = []

    def start(self, copies: BlockCopies) -> None:
        """Make all copies; see BlockTransfers."""
        if not copies:
            return
        copy, device, host = self._attention.copy_blocks, self._device, self._host
        if copies.swap_out:
            copy(device, host, block_pairs(copies.swap_out))
        if copies.copies:
            copy(device, device, block_pairs(copies.copies))
        for swap_in in copies.swap_in:
            copy(host, device, block_pairs(swap_in.pairs))
            self._arrived.append(swap_in.transfer_id)

    def arrived(self) -> tuple[int, ...]:
        """Return the swap-ins of the steps since the last call."""
        arrived = tuple(self._arrived)
        self._arrived.clear()
        return arrived

    def wait(self) -> None:
        """Return at once: every swap-in is done when it has been started."""


class Event(Protocol):
    """A mark in a stream's work; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Say whether the stream has done all work before the mark."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """A queue of work that a device does in order; `torch.cuda.Stream` is one."""

    def record_event(self) -> Event:
        """Mark the end of the work queued so far."""

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream begin only after the event."""


class StreamTransfers:
    """Copy to and from the host on a stream of its own, beside the forward passes.

        compute │ forward N ─┬─────────────────┬─ copies ─┬─ forward N+1
        copy    │            └─▶ swap_out N+1 ─┘          └─▶ swap_in N+1 ─▶ event

    A block leaves only when the work that wrote it is done, the forward pass that may reuse it
    starts only when it has left, and it returns only when nothing queued before still reads or
    writes the blocks that it comes to. No forward pass waits for a swap-in, unless a swap-out of a
    later step is queued behind it.

    Args:
        compute: the stream of the forward passes.
        copy: another one.
        enter: makes a stream the current one within a `with`, as `torch.cuda.stream` does.
    """

    def __init__(
        self,
        attention: AttentionBackend,
        device: KVCache,
        host: KVCache,
        *,
        compute: Stream,
        copy: Stream,
        enter: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        self._attention = attention
        self._device = device
        self._host = host
        self._compute = compute
        self._copy = copy
        self._enter = enter
        self._under_way: deque[tuple[int, Event]] = deque()

    @classmethod
    def on_cuda(
        cls, attention: AttentionBackend, device: KVCache, host: KVCache, on: torch.device
    ) -> Self:
        """Return transfers beside the current stream of a CUDA device."""
        return cls(
            attention,
            device,
            host,
            compute=torch.cuda.current_stream(on),
            copy=torch.cuda.Stream(on),  # type: ignore[no-untyped-call]
            enter=torch.cuda.stream,
        )

    def start(self, copies: BlockCopies) -> None:
        """Queue all copies and return before they are done; see BlockTransfers."""
        if copies.swap_out:
            self._copy.wait_event(self._compute.record_event())
            with self._enter(self._copy):
                self._attention.copy_blocks(self._device, self._host, block_pairs(copies.swap_out))
            self._compute.wait_event(self._copy.record_event())
        if copies.copies:
            with self._enter(self._compute):
                self._attention.copy_blocks(self._device, self._device, block_pairs(copies.copies))
        if copies.swap_in:
            self._copy.wait_event(self._compute.record_event())
        for swap_in in copies.swap_in:
            with self._enter(self._copy):
                self._attention.copy_blocks(self._host, self._device, block_pairs(swap_in.pairs))
            self._under_way.append((swap_in.transfer_id, self._copy.record_event()))

    def arrived(self) -> tuple[int, ...]:
        """Return the swap-ins whose events have passed; those of one stream pass in order."""
        arrived = []
        while self._under_way and self._under_way[0][1].query():
            arrived.append(self._under_way.popleft()[0])
        return tuple(arrived)

    def wait(self) -> None:
        """Wait for the oldest swap-in under way."""
        if self._under_way:
            self._under_way[0][1].synchronize()


def make_block_transfers(
    attention: AttentionBackend, device: KVCache, host: KVCache
) -> BlockTransfers:
    """Return the transfers that suit the memory of `device`."""
    where = device.storage.device
    if where.type == "cuda":
        return StreamTransfers.on_cuda(attention, device, host, where)
    return DirectTransfers(attention, device, host)


def block_pairs(pairs: tuple[BlockPair, ...]) -> torch.Tensor:
    """Return [num_pairs, 2] int64 of source and target, as `copy_blocks` takes them."""
    return torch.tensor(pairs, dtype=torch.int64)
