"""What mirrors hear of steps is enough to build the same inputs as beside the scheduler."""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.adapter import AdapterLoad
from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.executor.parallel.step_message import StepMirror, StepTeller
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput, ScoredPrompt

NUM_SLOTS = 2


class Ranks:
    """The scheduler's own builder, and two ranks that only hear messages."""

    def __init__(self, driver, max_known: int) -> None:
        limits, block_size = driver.scheduler.limits, driver.cache.block_size
        sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
        self.block_size = block_size
        self.own = BatchBuilder(*sizes, block_size, NUM_SLOTS)
        self.others = [
            (StepMirror(), BatchBuilder(*sizes, block_size, NUM_SLOTS)) for _ in range(2)
        ]
        self.teller = StepTeller(block_size, max_known)

    def check(self, output: SchedulerOutput) -> None:
        message = self.teller.tell(output)
        for mirror, builder in self.others:
            heard = mirror.hear(message).scheduled
            assert (heard.copies, heard.loads) == (output.copies, output.loads)
            assert [each.num_scheduled_tokens for each in heard.scheduled] == [
                each.num_scheduled_tokens for each in output.scheduled
            ]
            if output.scheduled:
                check_equal(builder.build(heard), self.own.build(output), self.block_size)


def check_equal(mine: BatchInputs, other: BatchInputs, size: int) -> None:
    lens = other.attention.seq_lens.tolist()
    for name in ("token_ids", "positions", "logits_rows", "pending"):
        assert torch.equal(getattr(mine, name), getattr(other, name)), name
    assert (mine.adapted is None) == (other.adapted is None)
    if mine.adapted is not None and other.adapted is not None:
        assert torch.equal(mine.adapted.rows, other.adapted.rows)
        assert torch.equal(mine.adapted.starts, other.adapted.starts)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert torch.equal(getattr(mine.attention, name), getattr(other.attention, name)), name
    # What stands behind a sequence's own blocks is never read.
    rows = zip(mine.attention.block_tables, other.attention.block_tables, lens, strict=True)
    assert all(torch.equal(a[: -(-n // size)], b[: -(-n // size)]) for a, b, n in rows)


@settings(max_examples=150)
@given(data=st.data())
def test_random_runs_look_alike_on_every_rank(draw_scheduler, play_at_random, data):
    num_stages = data.draw(st.sampled_from([1, 2]))
    driver = draw_scheduler(data, num_stages=num_stages)
    driver.steps_ahead = num_stages - 1
    max_num_seqs = driver.scheduler.limits.max_num_seqs
    ranks = Ranks(driver, max_num_seqs * data.draw(st.sampled_from([1, 2])))

    def step() -> None:
        numbers = data.draw(st.lists(st.integers(0, 9), max_size=2))
        step_checked(driver, ranks, tuple(AdapterLoad(n, n % NUM_SLOTS) for n in numbers))

    play_at_random(data, driver, range(-1, NUM_SLOTS), step)


def step_checked(driver, ranks: Ranks, loads: tuple[AdapterLoad, ...] = ()) -> None:
    output = driver.plan()
    ranks.check(replace(output, loads=loads))
    if not driver.run(output):
        driver.arrive()


def test_a_decode_step_is_told_in_nine_numbers_a_sequence(make_scheduler):
    driver = make_scheduler()
    teller = StepTeller(driver.cache.block_size, 16)
    driver.add("a", 100, max_tokens=20)
    for _ in range(6):
        output = driver.plan()
        message = teller.tell(output)
        driver.run(output)
    first_handle, num_parts = 15, 7
    assert array("i", message).tolist()[num_parts:] == [first_handle, -1, 101, 1, 1, 1, 0, 0, 9]


def test_copies_and_scored_rows_are_told(make_sequence):
    teller, mirror = StepTeller(4, 16), StepMirror()
    sequence = make_sequence("a", 6)
    sequence.block_table = [3, 5]
    copies = BlockCopies(((1, 2),), ((3, 4), (4, 5)), (SwapIn(8, ((0, 7), (1, 6))), SwapIn(9, ())))
    scored = (ScoredPrompt(sequence, 0, (11, 12)), ScoredPrompt(sequence, 4, (13,)))
    output = SchedulerOutput(
        (ScheduledSequence(sequence, 6, (sequence,)),), copies=copies, scored=scored
    )
    step = mirror.hear(teller.tell(output))
    assert step.scheduled.copies == copies
    assert step.scored_rows == (0, 1, 4)
    ((mirrored, count, draws),) = step.scheduled.scheduled
    assert (mirrored.token_ids, mirrored.block_table, count) == (sequence.token_ids, [3, 5], 6)
    assert draws == (mirrored,)
