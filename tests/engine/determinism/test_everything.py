"""All that may happen to a request happens at once, at random, and changes no bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from octavo.request import FinishReason

MUST_HAPPEN = (
    "chunks",
    "forks",
    "blocks copied",
    "blocks out",
    "swap-ins",
    "host hit tokens",
    "device hit tokens",
    "swaps",
    "recomputations",
    "aborts",
    "deadlines",
)


@pytest.fixture
def run_at_random():
    """Let requests come, be preempted, be aborted and be late at random until all have ended."""

    def run(driver, asks, random, num_requests):
        names = iter([f"{index}" for index in range(num_requests)])
        is_over = False
        while driver.engine.has_unfinished or not is_over:
            name = next(names, None) if random.random() < 0.4 else ""
            is_over = is_over or name is None
            if name:
                prompt, params = random.choice(asks)
                rank = random.randrange(3)
                driver.add(
                    name,
                    prompt,
                    replace(params, n=random.choice([1, 1, 2, 3])),
                    priority=rank,
                    tenant=str(rank),
                    deadline_s=driver.now_s + random.choice([20, 40, 1000, 1000, 1000]),
                )
            if driver.engine.has_unfinished:
                driver.step()
            if driver.scheduler.running and random.random() < 0.2:
                driver.preempt(random.choice(driver.scheduler.running))
            live = sorted({sequence.request_id for sequence in driver.scheduler.sequences()})
            if live and random.random() < 0.04:
                driver.abort(random.choice(live))
        driver.run()

    return run


@pytest.fixture
def check_all_happened():
    """Check that each kind of event has happened at least once."""

    def check(driver):
        stats, counts = driver.engine.stats(), driver.counts
        counts["swaps"] = stats.num_swap_preemptions_total
        counts["recomputations"] = stats.num_preemptions_total - counts["swaps"]
        counts["aborts"] = len(driver.aborted)
        outputs = [output for each in driver.outputs.values() for output in each]
        counts["deadlines"] = sum(o.finish_reason is FinishReason.DEADLINE for o in outputs)
        counts["device hit tokens"] = driver.num_hit_tokens - counts["host hit tokens"]
        assert not [what for what in MUST_HAPPEN if not counts[what]]

    return check


@pytest.mark.parametrize(
    ("policy", "mode", "block_size", "steps_ahead"),
    [
        ("fcfs", "swap", 16, 0),
        ("priority", "auto", 8, 0),
        ("fair", "auto", 32, 0),
        ("fcfs", "auto", 8, 1),
        ("priority", "swap", 16, 1),
        ("fair", "auto", 8, 1),
    ],
)
def test_everything_at_once_changes_no_answer(
    tiny, policy, mode, block_size, steps_ahead, run_at_random, check_all_happened
):
    driver = tiny.driver(
        steps_ahead=steps_ahead,
        scheduling_policy=policy,
        preemption_mode=mode,
        block_size=block_size,
        num_blocks=480 // block_size,
        num_host_blocks=96 // block_size,
        delay=1,
        max_num_batched_tokens=40,
        max_num_seqs=10,
    )
    run_at_random(driver, tiny.asks, Random(policy), 40)
    check_all_happened(driver)
    assert bool(driver.counts["pending tokens"]) is bool(steps_ahead)
    tiny.check(driver)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_everything_at_once_changes_nothing_of_what_prompts_are_told(
    tiny, steps_ahead, run_at_random
):
    driver = tiny.driver(
        steps_ahead=steps_ahead,
        preemption_mode="auto",
        num_blocks=30,
        num_host_blocks=6,
        delay=1,
        max_num_batched_tokens=40,
        max_num_seqs=10,
    )
    asks = [
        (prompt, replace(params, prompt_logprobs=index % 3 if index % 4 else None))
        for index, (prompt, params) in enumerate(tiny.asks)
    ]
    run_at_random(driver, asks, Random(5), 30)
    stats, counts = driver.engine.stats(), driver.counts
    assert 0 < stats.num_swap_preemptions_total < stats.num_preemptions_total
    assert all(counts[what] for what in ("chunks", "forks", "tokens scored"))
    assert driver.num_hit_tokens
    tiny.check(driver)


def test_everything_at_once_changes_no_answer_of_the_demo_model(
    demo, run_at_random, check_all_happened
):
    driver = demo.driver(
        preemption_mode="swap",
        num_blocks=9,
        num_host_blocks=4,
        delay=1,
        max_num_batched_tokens=40,
        max_num_seqs=4,
    )
    run_at_random(driver, demo.asks, Random(3), 20)
    check_all_happened(driver)
    demo.check(driver)
