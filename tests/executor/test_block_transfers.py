"""Copies on two streams end as if made one after the other, however the streams interleave.

A fake device queues what two streams are told and does it in an order that the test chooses. Blocks
are numbers in lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.executor.block_transfers import StreamTransfers

Pick = Callable[[list[str]], str]
"""Chooses which of the named streams does its next piece of work."""


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.is_past = False
        self._device = device

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.is_past)

    def pass_by(self) -> None:
        self.is_past = True


class FakeStream:
    """A queue of (description, what must have passed before, work)."""

    def __init__(self, device: FakeDevice) -> None:
        self.work: deque[tuple[str, FakeEvent | None, Callable[[], None]]] = deque()
        self._device = device

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.work.append(("record", None, event.pass_by))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._device.num_waits += 1
        if self._device.num_waits != self._device.forgotten_wait:
            self.work.append(("wait", event, lambda: None))

    def described(self) -> list[str]:
        return [description for description, _, _ in self.work]


class FakeDevice:
    """Two streams and their attention backend; may forget one wait for an event."""

    def __init__(self, pick: Pick, forgotten_wait: int = 0) -> None:
        self.num_waits = 0
        self.forgotten_wait = forgotten_wait
        self.streams = {"compute": FakeStream(self), "copy": FakeStream(self)}
        self.current = self.streams["compute"]
        self._pick = pick

    @contextmanager
    def enter(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy_blocks(self, source: list[int], target: list[int], pairs: torch.Tensor) -> None:
        def copy() -> None:
            for source_block, target_block in pairs.tolist():
                target[target_block] = source[source_block]

        self.current.work.append((f"copy {pairs.tolist()}", None, copy))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert self.step(), "the streams wait for each other"

    def step(self) -> bool:
        """Do one piece of work; return False if no stream can."""
        ready = [
            name
            for name, stream in self.streams.items()
            if stream.work and (stream.work[0][1] is None or stream.work[0][1].is_past)
        ]
        if ready:
            self.streams[self._pick(ready)].work.popleft()[2]()
        return bool(ready)

    def run(self) -> None:
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams.values())


def make_transfers(device: FakeDevice, blocks: list[int], host: list[int]) -> StreamTransfers:
    return StreamTransfers(
        device,  # type: ignore[arg-type]
        blocks,  # type: ignore[arg-type]
        host,  # type: ignore[arg-type]
        compute=device.streams["compute"],
        copy=device.streams["copy"],
        enter=device.enter,
    )


def swap_in(transfer_id: int, *pairs: tuple[int, int]) -> SwapIn:
    return SwapIn(transfer_id, pairs)


def copy_first(ready: list[str]) -> str:
    return ready[-1]


def compute_first(ready: list[str]) -> str:
    return ready[0]


def test_each_stream_waits_for_the_other_where_the_order_needs_it():
    device = FakeDevice(copy_first)
    transfers = make_transfers(device, [0] * 9, [0] * 9)
    transfers.start(BlockCopies(((1, 2), (3, 4)), ((5, 6),), (swap_in(7, (8, 1)),)))
    assert device.streams["compute"].described() == ["record", "wait", "copy [[5, 6]]", "record"]
    assert device.streams["copy"].described() == [
        "wait",
        "copy [[1, 2], [3, 4]]",
        "record",
        "wait",
        "copy [[8, 1]]",
        "record",
    ]


def test_a_step_without_copies_queues_nothing():
    device = FakeDevice(copy_first)
    make_transfers(device, [], []).start(BlockCopies())
    assert [stream.described() for stream in device.streams.values()] == [[], []]


def test_a_forward_pass_waits_for_no_swap_in():
    device = FakeDevice(compute_first)
    make_transfers(device, [0] * 9, [0] * 9).start(BlockCopies(swap_in=(swap_in(7, (8, 1)),)))
    assert device.streams["compute"].described() == ["record"]


def test_swap_ins_arrive_in_order_each_once_when_their_events_have_passed():
    device = FakeDevice(copy_first)
    transfers = make_transfers(device, [0] * 9, [0] * 9)
    transfers.start(BlockCopies(swap_in=(swap_in(3, (0, 0)), swap_in(1, (1, 1)))))
    assert transfers.arrived() == ()
    transfers.wait()
    assert transfers.arrived() == (3,)
    assert transfers.arrived() == ()
    device.run()
    assert transfers.arrived() == (1,)
    transfers.wait()
    assert transfers.arrived() == ()


NUM_BLOCKS = 5


def one_step(transfers: StreamTransfers, device: FakeDevice, blocks: list[int]) -> list[int]:
    """Write blocks, then evict, swap out, copy on write, bring back and write, all at once.

    Returns what a forward pass reads; it is `[11, 11, 13]` if every copy is in order.
    """
    read: list[int] = []

    def write_first() -> None:
        blocks[:] = [11, 12, 13, 14, 15]

    def forward() -> None:
        read.extend((blocks[0], blocks[1], blocks[2]))
        blocks[2] = 99

    device.current.work.append(("forward", None, write_first))
    # Block 1 leaves, takes a copy of block 0; block 3 leaves, and host block 4 comes into it.
    transfers.start(
        BlockCopies(((1, 0), (3, 1), (2, 2)), ((0, 1),), (swap_in(5, (4, 3)),)),
    )
    device.current.work.append(("forward", None, forward))
    device.run()
    return read


@pytest.mark.parametrize("pick", [copy_first, compute_first])
def test_blocks_are_reused_in_the_step_in_which_they_leave(pick):
    device, blocks, host = FakeDevice(pick), [0] * NUM_BLOCKS, [0, 0, 0, 0, 44]
    transfers = make_transfers(device, blocks, host)
    assert one_step(transfers, device, blocks) == [11, 11, 13]
    assert blocks == [11, 11, 99, 44, 15]
    assert host == [12, 14, 13, 0, 44]
    assert transfers.arrived() == (5,)


@pytest.mark.parametrize(("forgotten_wait", "pick"), [(1, copy_first), (2, compute_first)])
def test_a_forgotten_wait_is_found_out(forgotten_wait, pick):
    """The check above can fail: without either wait around a swap-out, content is lost."""
    device, blocks, host = FakeDevice(pick, forgotten_wait), [0] * NUM_BLOCKS, [0, 0, 0, 0, 44]
    one_step(make_transfers(device, blocks, host), device, blocks)
    assert host[:3] != [12, 14, 13]


def test_a_swap_in_that_does_not_wait_for_earlier_readers_is_found_out():
    device, blocks, host = FakeDevice(copy_first, forgotten_wait=1), [1], [2]
    transfers, read = make_transfers(device, blocks, host), []
    device.current.work.append(("forward", None, lambda: read.extend(blocks)))
    transfers.start(BlockCopies(swap_in=(swap_in(1, (0, 0)),)))
    device.run()
    assert read == [2], "the reader of what was there before sees what came later"


class InOrder:
    """The same blocks, with everything done at once when it is asked for."""

    def __init__(self, blocks: list[int], host: list[int]) -> None:
        self.blocks = list(blocks)
        self.host = list(host)

    def start(self, copies: BlockCopies) -> None:
        for source, target in copies.swap_out:
            self.host[target] = self.blocks[source]
        for source, target in copies.copies:
            self.blocks[target] = self.blocks[source]
        for each in copies.swap_in:
            for source, target in each.pairs:
                self.blocks[target] = self.host[source]


@given(data=st.data())
def test_any_interleaving_ends_as_if_everything_was_done_in_order(data):
    """Steps move random blocks; those on their way back belong to nobody else."""
    device = FakeDevice(lambda ready: data.draw(st.sampled_from(ready)))
    blocks, host = list(range(NUM_BLOCKS)), list(range(100, 100 + NUM_BLOCKS))
    transfers, in_order = make_transfers(device, blocks, host), InOrder(blocks, host)
    under_way: dict[int, tuple[int, int]] = {}
    read: list[int] = []
    expected: list[int] = []

    def forward(owned: list[int]) -> None:
        read.extend(blocks[block] for block in owned)
        blocks[owned[0]] += 1000

    for step in range(data.draw(st.integers(1, 5))):
        for transfer_id in transfers.arrived():
            del under_way[transfer_id]
        taken = list(zip(*under_way.values(), strict=True)) or [(), ()]
        hosts, owned = ([b for b in range(NUM_BLOCKS) if b not in side] for side in taken)
        host_block, block = st.sampled_from(hosts), st.sampled_from(owned)
        out = data.draw(st.lists(st.tuples(block, host_block), max_size=2))
        copies = data.draw(st.lists(st.tuples(block, block), max_size=2))
        back = data.draw(st.lists(st.tuples(host_block, block), max_size=len(owned) > 1))
        if back:
            under_way[step] = back[0]
            owned.remove(back[0][1])
        swap_ins = (swap_in(step, *back),) if back else ()
        for each in (transfers, in_order):
            each.start(BlockCopies(tuple(out), tuple(copies), swap_ins))
        device.current.work.append(("forward", None, partial(forward, owned)))
        expected += [in_order.blocks[block] for block in owned]
        in_order.blocks[owned[0]] += 1000
        for _ in range(data.draw(st.integers(0, 6))):
            device.step()
    device.run()
    assert (blocks, host) == (in_order.blocks, in_order.host)
    assert read == expected
