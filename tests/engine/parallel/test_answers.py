"""A model on several ranks answers as it does on one, whatever happens to its requests."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, seed=0)
SEEDED = replace(GREEDY, temperature=1.0, top_p=0.9)
RULED = replace(GREEDY, repetition_penalty=1.3, logit_bias=((9, 2.0),), min_tokens=4)


def check_alike(grid, ours, theirs) -> None:
    """Compare tokens; stages change no bit, and sums over ranks only the last ones."""
    assert ours.outputs.keys() == theirs.outputs.keys()
    for name, index in ours.outputs:
        assert ours.tokens(name, index) == theirs.tokens(name, index)
        for (_, mine), (_, other) in zip(
            ours.trace(name, index), theirs.trace(name, index), strict=True
        ):
            check_logprobs(grid, mine, other)


def check_logprobs(grid, mine, other) -> None:
    assert [each.token_id for each in mine] == [each.token_id for each in other]
    found, expected = ([each.logprob for each in row] for row in (mine, other))
    assert found == (expected if grid.tp == 1 else pytest.approx(expected, abs=1e-4))


def test_each_request_is_answered_as_by_one_rank(grid, make_drivers, make_prompts):
    drivers = make_drivers()
    for driver in drivers:
        prompts = make_prompts([3, 17, 40, 95, 130, 9])
        driver.add_all(list(zip(prompts, [GREEDY, SEEDED, RULED] * 2, strict=True)))
        driver.run()
    check_alike(grid, *drivers)


def test_several_answers_and_a_scored_prompt(grid, make_drivers, make_prompts):
    drivers = make_drivers()
    for driver in drivers:
        first, second = make_prompts([50, 21])
        driver.add("many", first, replace(SEEDED, n=3))
        driver.add("scored", second, replace(GREEDY, prompt_logprobs=1))
        driver.run()
    check_alike(grid, *drivers)
    assert drivers[0].counts["forks"] == 1
    ours, theirs = (driver.prompt_logprobs("scored") for driver in drivers)
    for mine, other in zip(ours, theirs, strict=True):
        check_logprobs(grid, mine, other)


def test_beams(grid, make_drivers, make_prompts):
    drivers = make_drivers()
    for driver in drivers:
        (prompt,) = make_prompts([30])
        driver.add("a", prompt, SamplingParams(max_tokens=8, beam_width=3, logprobs=1))
        driver.run()
    check_alike(grid, *drivers)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_makes_room_goes_on_where_it_was(grid, make_drivers, make_prompts, mode):
    drivers = make_drivers(num_blocks=12, preemption_mode=mode)
    for driver in drivers:
        prompts = make_prompts([33, 34, 35, 36])
        driver.add_all([(prompt, replace(GREEDY, max_tokens=40)) for prompt in prompts])
        driver.run()
    check_alike(grid, *drivers)
    stats = drivers[0].engine.stats()
    assert stats.num_preemptions_total > 0
    assert (stats.num_swap_preemptions_total > 0) is (mode == "swap")


def test_a_cached_prefix_is_used(grid, make_drivers, make_prompts):
    drivers = make_drivers()
    for driver in drivers:
        prefix, first, second = make_prompts([64, 5, 7])
        driver.add("a", prefix + first, GREEDY)
        driver.run()
        driver.add("b", prefix + second, GREEDY)
        driver.run()
        assert driver.num_hit_tokens == 64
    check_alike(grid, *drivers)


def test_everything_at_random(grid, make_drivers, make_prompts):
    """What is aborted or late says as much as it had time for; all blocks come back."""
    ours, alone = make_drivers(num_blocks=30, num_host_blocks=8)
    random = Random(0)
    prompts = make_prompts([20, 45, 70, 100])
    names = iter(range(30))
    is_over = False
    while ours.engine.has_unfinished or not is_over:
        name = next(names, None) if random.random() < 0.5 else -1
        is_over = is_over or name is None
        if name not in (None, -1):
            params = replace(random.choice([GREEDY, RULED]), n=random.choice([1, 1, 2]))
            late = ours.now_s + random.choice([15, 1000, 1000])
            ours.add(f"{name}", random.choice(prompts), params, deadline_s=late)
        if ours.engine.has_unfinished:
            ours.step()
        if ours.scheduler.running and random.random() < 0.2:
            ours.preempt(random.choice(ours.scheduler.running))
        live = sorted({sequence.request_id for sequence in ours.scheduler.sequences()})
        if live and random.random() < 0.05:
            ours.abort(random.choice(live))
    ours.run()
    for name, request in ours.requests.items():
        alone.add(name, list(request.prompt_token_ids), request.params)
        alone.run()
    for name, index in ours.outputs:
        tokens, expected = ours.tokens(name, index), alone.tokens(name, index)
        outputs = ours.outputs[name, index]
        is_whole = bool(outputs) and outputs[-1].finish_reason is FinishReason.LENGTH
        assert tokens == (expected if is_whole else expected[: len(tokens)]), (name, index)
    stats = ours.engine.stats()
    assert 0 < stats.num_swap_preemptions_total < stats.num_preemptions_total
    assert ours.aborted
    assert ours.num_hit_tokens > 0


def test_stages_compute_different_sequences_at_once(grid, make_drivers, make_prompts):
    ours, _ = make_drivers()
    ours.add_all([(prompt, GREEDY) for prompt in make_prompts([4] * 6)])
    most_under_way = 0
    while ours.engine.has_unfinished:
        ours.step()
        under_way = [s for s in ours.scheduler.running if s.num_steps_under_way]
        assert all(s.num_steps_under_way == 1 for s in under_way)
        most_under_way = max(most_under_way, len(under_way))
    assert bool(most_under_way) is (grid.pp > 1)
