from __future__ import annotations

import pytest
from benchmarks.peers.loads import WORKLOADS, Load
from benchmarks.peers.measure import Measurement, Plan, best_rate, check, summary
from benchmarks.peers.report import Results, SideFacts, markdown
from benchmarks.peers.side import Reply, Unavailable
from benchmarks.quiet import QuietWatch
from benchmarks.workload import Job

MIXED = WORKLOADS[0]


class EchoSide:
    """Answers every request after a second, a token every tenth of one; fails when told to."""

    transport = "none"

    def __init__(self, name, process_id, fails_at=None):
        self.name = name
        self.title = name.title()
        self.process_id = process_id
        self.heard = []
        self._fails_at = fails_at

    def start(self):
        self.heard.append("start")

    def play(self, load):
        self.heard.append("play")
        if self.heard.count("play") == self._fails_at:
            raise Unavailable("it fell over")
        return [
            Reply(0.0, tuple(1.0 + 0.1 * token for token in range(job.num_output_tokens)))
            for job in load.jobs
        ]

    def pause(self):
        self.heard.append("pause")

    def resume(self):
        self.heard.append("resume")

    def stop(self):
        self.heard.append("stop")


@pytest.fixture
def measurement():
    return Measurement(Plan((MIXED,), 2, True, None), lambda _: None)


def make_play(side, seconds, foreign_share):
    watch = QuietWatch()
    watch.foreign_share = foreign_share
    replies = [Reply(0.0, (seconds / 2, seconds))] * 10
    return summary(side, "mixed", 0, replies, 2**30, watch)


def facts(name):
    return SideFacts(name, name.title(), "none", {"it": "1"}, {"option": "x"})


def test_sides_play_in_turns_and_only_the_one_that_plays_runs(measurement, own_pid):
    sides = [EchoSide("octavo", own_pid), EchoSide("other", own_pid)]
    measurement.run(sides, lambda: None)
    assert [play.side for play in measurement.plays] == ["octavo", "other"] * 2
    for side in sides:
        turn = ["resume", "play", "pause"]
        assert side.heard == ["start", "play", "pause", *turn, *turn, "stop"]


def test_a_side_that_fails_is_stopped_and_told_of_and_the_others_go_on(measurement, own_pid):
    broken = EchoSide("broken", own_pid, fails_at=2)
    measurement.run([broken, EchoSide("whole", own_pid)], lambda: None)
    assert [(each.side, each.stage) for each in measurement.failures] == [("broken", "mixed")]
    assert [play.side for play in measurement.plays] == ["whole"] * 2
    assert "stop" in broken.heard


def test_an_answer_of_another_length_than_asked_for_is_a_failure():
    load = Load((Job([1], 2),), (0.0,), 1)
    check(load, [Reply(0.0, (1.0, 2.0))])
    with pytest.raises(Unavailable, match="1 tokens, not 2"):
        check(load, [Reply(0.0, (1.0,))])


def test_figures_of_a_play_are_those_of_its_times():
    play = make_play("other", 4.0, 0.0)
    assert (play.tokens_per_s, play.requests_per_s) == (5.0, 2.5)
    assert (play.first_token_p50_s, play.per_token_p50_s) == (2.0, 2.0)


def test_capacity_is_the_best_peers_and_never_octavos_own():
    plays = [make_play("octavo", 1.0, 0), make_play("fast", 2.0, 0), make_play("slow", 4.0, 0)]
    assert best_rate(plays) == 5.0
    assert best_rate(plays[:1]) is None


def test_a_play_in_a_crowd_counts_only_where_there_is_no_other_and_is_marked_then():
    plays = (
        make_play("octavo", 1.0, 0.0),
        make_play("octavo", 9.0, 0.5),
        make_play("other", 2.0, 0.5),
    )
    sides = (facts("octavo"), facts("other"))
    text = markdown(Results(sides, (MIXED,), plays, (), None, False))
    assert "| 20 (20 to 20) | void 10 (10 to 10) | void 2.00 |" in text


def test_a_report_of_arrivals_alone_has_no_table_of_throughput():
    paced = next(workload for workload in WORKLOADS if workload.capacity_share is not None)
    text = markdown(Results((facts("octavo"),), (paced,), (), (), 7.0, False))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        f"## {paced.title}: {7.0 * paced.capacity_share:.2f} requests/s to every side, ms",
        "## Sides",
    ]


def test_the_report_tells_why_a_peer_was_not_played(measurement, own_pid):
    measurement.run([EchoSide("broken", own_pid, fails_at=1)], lambda: None)
    failures = tuple(measurement.failures)
    text = markdown(Results((facts("broken"),), (MIXED,), (), failures, None, False))
    assert "| broken | start | it fell over |" in text
