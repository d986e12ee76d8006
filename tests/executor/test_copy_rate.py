"""The rate of copies is measured on the way that swaps take, and leaves nothing behind."""

from __future__ import annotations

import pytest

from octavo.cache.block_copies import BlockCopies
from octavo.executor.copy_rate import measure_copy_rate

BYTES_PER_BLOCK = 1 << 20


class TimedTransfers:
    """Transfers that take 1 ms and 1 ms a block, ten times that the first time; and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_blocks: list[int] = []
        self._arrived: list[int] = []

    def start(self, copies: BlockCopies) -> None:
        assert self._arrived == [], "a swap-in was not taken"
        pairs = copies.swap_out or copies.swap_in[0].pairs
        seconds = 0.001 + 0.001 * len(pairs)
        self.now_s += seconds if self.num_blocks else 10 * seconds
        self.num_blocks.append(len(pairs))
        self._arrived += [swap_in.transfer_id for swap_in in copies.swap_in]

    def arrived(self) -> tuple[int, ...]:
        arrived, self._arrived = tuple(self._arrived), []
        return arrived

    def wait(self) -> None:
        assert self._arrived


def test_latency_and_rate_come_from_trips_of_one_block_and_of_many():
    transfers = TimedTransfers()
    rate = measure_copy_rate(transfers, 1000, BYTES_PER_BLOCK, lambda: transfers.now_s)
    # The latency is a 33rd of the long trip, and counted in its rate.
    assert rate.bytes_per_s == pytest.approx(32 * BYTES_PER_BLOCK / 0.033)
    assert rate.latency_s == pytest.approx(0.002 - 0.033 / 32)
    assert transfers.num_blocks == [32] * 8 + [1] * 8, "32 MiB at most"
    assert transfers.arrived() == ()


def test_scattered_blocks_leave_and_come_back_to_where_they_were():
    pairs: list[tuple[tuple[int, int], ...]] = []

    class RecordingTransfers(TimedTransfers):
        def start(self, copies: BlockCopies) -> None:
            super().start(copies)
            pairs.append(copies.swap_out or copies.swap_in[0].pairs)

    transfers = RecordingTransfers()
    measure_copy_rate(transfers, 5, BYTES_PER_BLOCK, lambda: transfers.now_s)
    out, back = pairs[:2]
    assert [block for block, _ in out] == [4, 3, 2, 1, 0]
    assert [place for _, place in out] == [0, 1, 2, 3, 4], "one copy on the bus moves them all"
    assert back == tuple((place, block) for block, place in out)


def test_one_block_is_enough():
    transfers = TimedTransfers()
    rate = measure_copy_rate(transfers, 1, BYTES_PER_BLOCK, lambda: transfers.now_s)
    assert rate.bytes_per_s == pytest.approx(BYTES_PER_BLOCK / 0.002)
    assert rate.latency_s == 0.0


def test_a_block_larger_than_the_limit_is_measured_all_the_same():
    transfers = TimedTransfers()
    measure_copy_rate(transfers, 5, 1 << 30, lambda: transfers.now_s)
    assert transfers.num_blocks == [1] * 16
