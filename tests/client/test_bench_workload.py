from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from octavo_client.bench.lengths import Lengths
from octavo_client.bench.workload import Job, Workload, draw_arrivals, draw_jobs

WORKLOAD = Workload(
    Lengths.parse("4-8"), Lengths.parse("2-9"), shared_prefix=0.5, cancel_share=0.5, seed=3
)


def jobs(workload=WORKLOAD, count=100):
    return list(islice(draw_jobs(workload), count))


def test_a_seed_gives_these_jobs():
    assert jobs(count=4) == [
        Job((7441, 2970, 9037, 3340), 3, 1, 1726911010),
        Job((7441, 2970, 4135, 1422, 9899, 4119, 1862), 5, None, 1391821846),
        Job((7441, 2970, 4135, 6782, 5668, 1514), 2, 1, 565754954),
        Job((7441, 2970, 9071, 6978), 4, None, 504328904),
    ]


def test_a_seed_gives_these_poisson_arrivals():
    times = [round(time_s, 6) for time_s in islice(draw_arrivals(10.0, seed=7), 5)]
    assert times == [0.049401, 0.134675, 0.715595, 0.829218, 0.88415]


def test_arrivals_come_at_their_rate_and_faster_ones_in_the_same_pattern():
    slow = list(islice(draw_arrivals(2.0, seed=1), 4000))
    fast = list(islice(draw_arrivals(8.0, seed=1), 4000))
    assert slow[-1] == pytest.approx(2000, rel=0.05)
    assert slow == pytest.approx([4 * time_s for time_s in fast])


def test_the_same_seed_gives_the_same_workload_and_another_another():
    assert jobs() == jobs()
    assert jobs() != jobs(replace(WORKLOAD, seed=4))


def test_what_is_cancelled_changes_neither_prompts_nor_lengths():
    without = jobs(replace(WORKLOAD, cancel_share=0.0))
    assert [replace(job, cancel_after=None) for job in jobs()] == without


def test_a_larger_cancel_share_cancels_the_same_jobs_and_more():
    few, many = (
        {
            place
            for place, job in enumerate(jobs(replace(WORKLOAD, cancel_share=share)))
            if job.cancel_after
        }
        for share in (0.2, 0.6)
    )
    assert few < many
    assert (len(few), len(many)) == (14, 59)


def test_cancelled_jobs_end_between_their_first_and_their_last_token():
    every = jobs(replace(WORKLOAD, cancel_share=1.0), 500)
    assert all(1 <= job.cancel_after < job.num_output_tokens for job in every)
    assert {job.cancel_after for job in every if job.num_output_tokens == 9} == set(range(1, 9))


def test_an_answer_of_one_token_is_never_cancelled():
    one = replace(WORKLOAD, output_tokens=Lengths.parse("1"), cancel_share=1.0)
    assert {job.cancel_after for job in jobs(one)} == {None}


@pytest.mark.parametrize(("share", "shared"), [(0.0, 0), (0.25, 25), (1.0, 100)])
def test_the_shared_part_of_a_prompt_is_common_to_all_and_the_rest_is_not(share, shared):
    prompts = [
        job.prompt
        for job in jobs(replace(WORKLOAD, prompt_tokens=Lengths.parse("100"), shared_prefix=share))
    ]
    assert len({prompt[:shared] for prompt in prompts}) == 1
    assert len({prompt[shared:] for prompt in prompts}) == (1 if shared == 100 else 100)


def test_prompts_are_ids_of_the_range_and_use_all_of_it():
    narrow = replace(WORKLOAD, token_ids=(5, 9), prompt_tokens=Lengths.parse("50"))
    assert {token for job in jobs(narrow) for token in job.prompt} == {5, 6, 7, 8, 9}


def draw(text, count=4000):
    random = Random(0)
    lengths = Lengths.parse(text)
    return [lengths.draw(random) for _ in range(count)]


def test_a_fixed_length_is_always_the_same():
    assert set(draw("17")) == {17}


def test_uniform_lengths_take_every_value_about_equally_often():
    counts = Counter(draw("3-6"))
    assert set(counts) == {3, 4, 5, 6}
    assert all(900 < count < 1100 for count in counts.values())


def test_log_normal_lengths_have_their_median_and_spread():
    drawn = sorted(draw("100:0.5"))
    assert drawn[len(drawn) // 2] == pytest.approx(100, rel=0.05)
    # e to the 0.5 is 1.649: one standard deviation up.
    assert drawn[int(0.8413 * len(drawn))] == pytest.approx(165, rel=0.05)


def test_bounded_log_normal_lengths_stay_within_their_bounds():
    drawn = sorted(draw("16-512:96"))
    assert (drawn[0], drawn[-1]) == (16, 512)
    assert drawn[len(drawn) // 2] == pytest.approx(96, rel=0.05)


@pytest.mark.parametrize("text", ["", "x", "-4", "1.5", "3-", "9:", "9:-1", "1-2-3", "3:4:5"])
def test_what_is_no_distribution_is_refused_with_the_forms(text):
    with pytest.raises(
        ValueError, match="is no distribution of lengths: write N, A-B, MEDIAN:SIGMA"
    ):
        Lengths.parse(text)


@pytest.mark.parametrize("text", ["0", "8-4", "4-8:9", "4-8:3", "0-8:3", "0:1"])
def test_bounds_that_do_not_rise_are_refused(text):
    with pytest.raises(ValueError, match="1 <= A <= MEDIAN <= B"):
        Lengths.parse(text)
