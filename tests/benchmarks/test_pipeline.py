"""The simulated pipeline: idle shares that can be counted by hand."""

from __future__ import annotations

import pytest
from benchmarks.pipeline import Pipeline, play
from benchmarks.workload import Job

from octavo.scheduler.admission import SchedulerLimits


@pytest.fixture
def run():
    """Play answers of 100 tokens on 4 stages of one second a step, so many in flight."""

    def play_jobs(num_jobs: int, in_flight: int):
        jobs = [Job([index + 1], 100) for index in range(num_jobs)]
        limits = SchedulerLimits(8, 64, 200, num_stages=in_flight)
        return play(jobs, Pipeline(4, 1.0, 0.0), limits, num_blocks=256)

    return play_jobs


def test_one_step_at_a_time_keeps_one_stage_of_four_busy(run):
    assert (run(8, 1).idle_share, run(8, 1).seconds) == (0.75, 400.0)


def test_as_many_steps_as_stages_leave_only_filling_and_draining(run):
    result = run(8, 4)
    assert result.num_steps == 400
    assert result.seconds <= 400 + 3 + 8
    assert result.idle_share < 0.03


def test_a_lonely_request_fills_no_pipeline(run):
    assert run(1, 4).idle_share == 0.75
