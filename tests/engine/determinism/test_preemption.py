"""Making room, by recomputation or by swap, changes no bit of any answer."""

from __future__ import annotations

import pytest


@pytest.fixture
def preempt_at():
    """Preempt every running sequence once at each of its tokens whose number `every` divides."""

    def make(driver, every):
        done = set()

        def preempt():
            for sequence in reversed(driver.scheduler.running):
                number = sequence.num_output_tokens
                mark = (sequence.request_id, sequence.index, number)
                if number and number % every == 0 and mark not in done:
                    done.add(mark)
                    driver.preempt(sequence)

        return preempt

    return make


@pytest.fixture
def num_marks():
    """Count the tokens at which `preempt_at` preempts: the last one ends its sequence."""

    def count(asks, every):
        return sum(params.n * len(range(every, params.max_tokens, every)) for _, params in asks)

    return count


def test_a_sequence_recomputed_at_each_token_answers_the_same(model, preempt_at, num_marks):
    driver = model.driver(
        preemption_mode="recompute", enable_prefix_caching=False, max_num_batched_tokens=64
    )
    driver.add_all(model.asks)
    driver.run(preempt_at(driver, 1))
    stats = driver.engine.stats()
    assert stats.num_preemptions_total == num_marks(model.asks, 1)
    assert stats.num_swap_preemptions_total == driver.counts["blocks out"] == 0
    model.check(driver)


def test_a_recomputed_sequence_finds_its_own_blocks_again(tiny, preempt_at, num_marks):
    driver = tiny.driver(preemption_mode="recompute", max_num_batched_tokens=64)
    driver.add_all(tiny.asks)
    driver.run(preempt_at(driver, 3))
    stats = driver.engine.stats()
    assert stats.num_preemptions_total == num_marks(tiny.asks, 3)
    num_known = sum(params.n * len(prompt) for prompt, params in tiny.asks)
    assert stats.num_computed_tokens_total < 6 * num_known / 2
    tiny.check(driver)


def test_a_sequence_swapped_out_and_in_at_each_token_answers_the_same(model, preempt_at, num_marks):
    driver = model.driver(
        preemption_mode="swap", num_host_blocks=100, delay=1, enable_prefix_caching=False
    )
    driver.add_all(model.asks)
    driver.run(preempt_at(driver, 1))
    stats = driver.engine.stats()
    num_swaps = num_marks(model.asks, 1)
    assert stats.num_swap_preemptions_total == stats.num_preemptions_total == num_swaps
    assert driver.counts["swap-ins"] == num_swaps
    assert driver.counts["blocks out"] >= num_swaps
    model.check(driver)


@pytest.mark.parametrize("delay", [0, 3])
def test_swaps_and_the_cache_together_change_no_answer(tiny, delay, preempt_at, num_marks):
    driver = tiny.driver(
        preemption_mode="swap",
        num_blocks=64,
        num_host_blocks=100,
        delay=delay,
        max_num_batched_tokens=64,
    )
    driver.add_all(tiny.asks)
    driver.add_all(tiny.asks, "again ")
    driver.run(preempt_at(driver, 2))
    stats = driver.engine.stats()
    assert stats.num_swap_preemptions_total >= 2 * num_marks(tiny.asks, 2)
    # Full blocks are still on the device when their sequence comes back, most of the time.
    assert 100 < driver.counts["swap-ins"] <= stats.num_swap_preemptions_total
    assert driver.num_hit_tokens > 0
    tiny.check(driver)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_preempted_after_each_chunk_answers_the_same(tiny, mode):
    driver = tiny.driver(
        preemption_mode=mode,
        num_host_blocks=100,
        delay=1,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    driver.add_all(tiny.asks)
    done = set()

    def preempt():
        for sequence in reversed(driver.scheduler.running):
            mark = (sequence.request_id, sequence.num_computed_tokens)
            if sequence.num_output_tokens == 0 and mark not in done:
                done.add(mark)
                driver.preempt(sequence)

    driver.run(preempt)
    assert driver.engine.stats().num_preemptions_total == len(done) >= 20
    tiny.check(driver)


@pytest.mark.parametrize(
    ("mode", "num_host_blocks"), [("recompute", 0), ("swap", 100), ("swap", 2)]
)
def test_pools_too_small_for_all_give_the_same_answers(tiny, mode, num_host_blocks):
    driver = tiny.driver(
        preemption_mode=mode,
        num_blocks=13,
        num_host_blocks=num_host_blocks,
        delay=2,
        enable_prefix_caching=False,
    )
    driver.add_all(tiny.asks)
    driver.add_all(tiny.asks, "again ")
    driver.run()
    stats = driver.engine.stats()
    num_swaps = stats.num_swap_preemptions_total
    assert stats.num_preemptions_total > 0
    assert bool(num_swaps) is (mode == "swap")
    assert (num_swaps < stats.num_preemptions_total) is (num_host_blocks < 100)
    tiny.check(driver)


@pytest.mark.parametrize("delay", [1, 3])
def test_an_abort_while_blocks_come_back_changes_nobody_else(tiny, delay):
    driver = tiny.driver(
        preemption_mode="swap",
        num_blocks=40,
        num_host_blocks=100,
        delay=delay,
        max_num_batched_tokens=64,
    )
    driver.add_all(tiny.asks)
    driver.add_all(tiny.asks, "again ")
    num_aborted = 0

    def disturb():
        nonlocal num_aborted
        for sequence in list(driver.scheduler.restoring.values()):
            if sequence.request_id.startswith("again") and sequence.finish_reason is None:
                driver.abort(sequence.request_id)
                num_aborted += 1
        for sequence in reversed(driver.scheduler.running):
            if sequence.num_output_tokens % 4 == 1:
                driver.preempt(sequence)

    driver.run(disturb)
    assert num_aborted >= 5
    tiny.check(driver)
