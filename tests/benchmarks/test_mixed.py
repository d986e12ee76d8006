"""Static batching beside Octavo: what is read from the times of both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.memory import static_batches
from benchmarks.mixed import MIXED, Play, batch_ends_s, ends_of, play_rows, summary
from benchmarks.peers.loads import Load
from benchmarks.peers.side import Reply
from benchmarks.quiet import QuietWatch
from benchmarks.workload import Job

OURS = Play("octavo", 0, 800.0, 2.0, 3.0, 0.0, is_valid=True)
THEIRS = Play("static", 0, 100.0, 8.0, 12.0, 0.0, is_valid=True)


def ratios(plays):
    return [row.ratio for row in play_rows(plays)]


def test_an_answer_of_a_static_batch_is_there_when_the_longest_of_its_batch_is():
    replies = [Reply(0.0, (1.0, end)) for end in (4.0, 9.0, 5.0, 12.0, 11.0)]
    assert batch_ends_s(replies, 2) == [9.0, 9.0, 12.0, 12.0, 11.0]


def test_an_answer_of_octavo_is_there_with_its_last_token():
    assert ends_of([Reply(0.5, (1.0, 4.0)), Reply(0.0, (2.0,))]) == [4.0, 2.0]


def test_latencies_count_from_when_all_were_sent_and_long_is_the_quarter_of_most_output():
    jobs = tuple(Job([1], length) for length in (1, 2, 3, 4))
    load = Load(jobs, (0.0,) * 4, 4)
    play = summary("static", 0, load, [20.0, 10.0, 10.0, 5.0], QuietWatch())
    assert (play.tokens_per_s, play.latency_p50_s, play.long_latency_p99_s) == (0.5, 10.0, 5.0)


def test_a_quarter_of_the_mixed_requests_is_long():
    load = MIXED.load(0, False, None)
    ends_s = [float(job.num_output_tokens) for job in load.jobs]
    lengths = sorted(ends_s)
    assert summary("octavo", 0, load, ends_s, QuietWatch()).long_latency_p99_s <= lengths[-1]
    assert sum(length >= lengths[48] for length in lengths) == 16


def test_ratios_are_medians_of_rounds():
    plays = [
        replace(play, round=number)
        for number, speed in enumerate((900.0, 100.0, 300.0))
        for play in (replace(OURS, tokens_per_s=speed), THEIRS)
    ]
    assert ratios(plays) == [0.25, 3.0, 0.25]


def test_a_round_in_which_one_side_was_disturbed_counts_for_neither():
    disturbed = [replace(OURS, round=1, tokens_per_s=1.0), replace(THEIRS, round=1, is_valid=False)]
    assert ratios([OURS, THEIRS, *disturbed]) == [0.25, 8.0, 0.25]


def test_figures_are_marked_where_no_round_was_quiet():
    rows = play_rows([OURS, replace(THEIRS, is_valid=False)])
    assert [row.figure.startswith("VOID: ") for row in rows] == [True] * 3


def test_a_static_batch_reserves_its_longest_prompt_and_output_for_every_row():
    # Two rows of 4 + 3 slots for three steps; the rows hold 2, 3, 4 + 1, 1, 1 and 4 + 1, 2, 3.
    jobs = [Job([1] * 2, 1), Job([1] * 4, 3)]
    reservation = static_batches(jobs, 2)
    assert reservation.reserved_slots == 14
    assert reservation.filled_share == pytest.approx((3 + 3 + 3 + 5 + 6 + 7) / (3 * 14))
