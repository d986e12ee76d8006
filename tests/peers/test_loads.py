from __future__ import annotations

import pytest
from benchmarks.peers.loads import WORKLOADS
from benchmarks.workload import mixed_workload

BY_NAME = {workload.name: workload for workload in WORKLOADS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_play_is_the_same_for_every_side(name):
    workload = BY_NAME[name]
    assert workload.load(3, False, 5.0) == workload.load(3, False, 5.0)


@pytest.mark.parametrize("name", BY_NAME)
def test_another_play_has_other_prompts_of_the_same_lengths_and_arrivals(name):
    first, second = (BY_NAME[name].load(play, False, 5.0) for play in (0, 1))
    prompts = [[tuple(job.prompt_token_ids) for job in load.jobs] for load in (first, second)]
    assert not set(prompts[0]) & set(prompts[1])
    assert [len(prompt) for prompt in prompts[0]] == [len(prompt) for prompt in prompts[1]]
    assert first.arrivals_s == second.arrivals_s


def test_mixed_requests_have_the_lengths_of_the_mixed_workload():
    jobs = BY_NAME["mixed"].load(0, False, None).jobs
    assert [(len(job.prompt_token_ids), job.num_output_tokens) for job in jobs] == [
        (len(job.prompt_token_ids), job.num_output_tokens) for job in mixed_workload(0, 64)
    ]


def test_prefix_requests_share_exactly_512_tokens():
    prompts = [job.prompt_token_ids for job in BY_NAME["prefix"].load(0, False, None).jobs]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {544}


def test_poisson_requests_arrive_at_their_share_of_the_capacity():
    load = BY_NAME["poisson-50"].load(0, False, 10.0)
    assert len(load.jobs) / load.arrivals_s[-1] == pytest.approx(5.0, rel=0.2)
    half = BY_NAME["poisson-50"].load(0, False, 5.0)
    assert half.arrivals_s == pytest.approx([2 * each for each in load.arrivals_s])


def test_a_quick_try_has_few_requests_and_short_answers():
    for workload in WORKLOADS:
        jobs = workload.load(0, True, 5.0).jobs
        assert len(jobs) <= 8
        assert max(job.num_output_tokens for job in jobs) <= 16
