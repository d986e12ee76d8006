"""What is found in the cache, on the device or the host, gives the bits that computing it gives.

And nothing wrong is ever found there, whatever became of the request that computed it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.fixture
def run_one_by_one():
    """Run requests one after the other, so that later ones find what earlier ones computed."""

    def run(driver, asks, prefix=""):
        for index, ask in enumerate(asks):
            driver.add(f"{prefix}{index}", *ask)
            driver.run()

    return run


def test_a_prompt_found_on_the_device_answers_as_a_cold_one(model, run_one_by_one):
    driver = model.driver()
    run_one_by_one(driver, model.asks)
    num_cold = driver.num_hit_tokens
    run_one_by_one(driver, model.asks, "warm ")
    # All full blocks before the last token: what is computed again is the rest.
    assert driver.num_hit_tokens - num_cold == sum(
        (len(prompt) - 1) // 16 * 16 for prompt, _ in model.asks
    )
    assert driver.counts["swap-ins"] == driver.counts["blocks out"] == 0
    if model.name == "mistral":
        assert driver.counts["blocks left behind"] > 0
    model.check(driver)


def test_a_prompt_found_on_the_host_answers_as_a_cold_one(model, run_one_by_one):
    num_blocks = 6 if model.name == "demo" else 13
    driver = model.driver(num_blocks=num_blocks, num_host_blocks=100, delay=1)
    run_one_by_one(driver, model.asks)
    filler = (([8, 9] * 8 * num_blocks)[1:], replace(model.asks[0][1], max_tokens=1))
    num_found = num_from_host = 0
    for index, ask in enumerate(model.asks):
        run_one_by_one(driver, [filler], f"fills the device {index} ")
        num_found -= driver.num_hit_tokens
        num_from_host -= driver.counts["host hit tokens"]
        run_one_by_one(driver, [ask], f"warm {index} ")
        num_found += driver.num_hit_tokens
        num_from_host += driver.counts["host hit tokens"]
    assert num_found == sum((len(prompt) - 1) // 16 * 16 for prompt, _ in model.asks)
    # What left the window is not fetched.
    assert num_from_host < num_found if model.name == "mistral" else num_from_host == num_found
    assert num_from_host >= 64
    assert driver.engine.stats().num_preemptions_total == 0
    model.check(driver)


def test_a_batch_that_begins_alike_computes_its_beginning_once(tiny):
    driver = tiny.driver(max_num_batched_tokens=64)
    prompt, params = tiny.asks[0]
    for index in range(6):
        driver.add(str(index), [*prompt, *range(20, 20 + index)], replace(params, seed=index))
    driver.run()
    assert driver.num_hit_tokens == 5 * 64
    tiny.check(driver)


def test_a_later_turn_finds_the_earlier_answer(tiny, run_one_by_one):
    driver = tiny.driver()
    turns = []
    for index, (prompt, params) in enumerate(tiny.asks):
        driver.add(str(index), prompt, params)
        driver.run()
        turns.append(([*prompt, *driver.tokens(str(index), params.n - 1), 9, 8, 7], params))
    before = driver.num_hit_tokens
    run_one_by_one(driver, turns, "next ")
    # The last token of an answer is never computed.
    assert driver.num_hit_tokens - before == sum(
        (len(prompt) - 4) // 16 * 16 for prompt, _ in turns
    )
    tiny.check(driver)


def test_salts_keep_requests_apart_and_change_no_answer(tiny):
    driver = tiny.driver()
    for salt in ("", "mine", "yours"):
        driver.add(salt, *tiny.asks[0], cache_salt=salt)
        driver.run()
    assert driver.num_hit_tokens == 0
    driver.add("mine again", *tiny.asks[0], cache_salt="mine")
    driver.run()
    assert driver.num_hit_tokens == 64
    tiny.check(driver)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_an_aborted_prompt_leaves_only_its_computed_blocks(tiny, num_steps):
    driver = tiny.driver(max_num_batched_tokens=40)
    prompt, params = tiny.asks[4]
    driver.add("aborted", prompt, params)
    for _ in range(num_steps):
        driver.step()
    driver.abort("aborted")
    driver.add("again", prompt, params)
    driver.run()
    assert driver.num_hit_tokens == [32, 80, 112, 112][num_steps - 1]
    tiny.check(driver)


# The step after each of these copies no block; after another an engine refuses to go on.
@pytest.mark.parametrize("num_steps", [1, 3, 4, 6, 8])
def test_a_step_that_fails_publishes_nothing(tiny, num_steps):
    driver = tiny.driver(max_num_batched_tokens=40)
    driver.add_all(tiny.asks)
    for _ in range(num_steps):
        driver.step()

    def fail(output):
        tiny.spoil(output)
        raise RuntimeError("the device is gone")

    driver.runner.after_execute = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.step()
    del driver.runner.after_execute
    for name in {item.sequence.request_id for item in driver.runner.last.scheduled}:
        driver.abort(name)
    driver.add_all(tiny.asks, "again ")
    driver.run()
    assert driver.aborted
    assert driver.num_hit_tokens > 0
    tiny.check(driver)
