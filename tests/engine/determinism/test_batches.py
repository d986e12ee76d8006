"""A request's tokens and log-probabilities are the same to the bit, whatever is computed beside it.

Alone or in a batch, its prompt whole or in chunks, in blocks of any size, as one of n answers or as
the only one. Each answer is compared with that of a request that ran alone.
"""

from __future__ import annotations

import pytest


def test_a_request_in_a_batch_answers_as_it_does_alone(model):
    driver = model.driver(enable_prefix_caching=False, max_num_batched_tokens=2048)
    driver.add_all(model.asks)
    driver.add_all(model.asks, "again ")
    driver.run()
    assert driver.counts["most rows"] > len(model.asks)
    assert driver.counts["chunks"] == 0
    model.check(driver)


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(8, 17), (16, 16), (16, 64), (32, 40), (32, 300)]
)
def test_chunk_and_block_sizes_do_not_change_an_answer(tiny, block_size, chunk):
    driver = tiny.driver(
        block_size=block_size,
        num_blocks=1024 // block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    driver.add_all(tiny.asks)
    driver.run()
    assert driver.counts["chunks"] >= 512 // chunk
    tiny.check(driver)


def test_a_prompt_in_chunks_answers_as_it_does_whole(model):
    driver = model.driver(max_num_batched_tokens=15, max_num_seqs=8, enable_prefix_caching=False)
    driver.add_all(model.asks)
    driver.run()
    assert driver.counts["chunks"] >= 8
    model.check(driver)


def test_each_of_n_answers_is_that_of_a_request_with_its_seed(model):
    driver = model.driver(max_num_batched_tokens=40, enable_prefix_caching=False)
    driver.add_all([ask for ask in model.asks if ask[1].n > 1])
    driver.run()
    assert driver.counts["forks"] == len(driver.requests)
    assert driver.counts["blocks copied"] > 0
    assert driver.engine.stats().num_preemptions_total == 0
    model.check(driver)


def test_steps_planned_before_the_last_tokens_are_known_change_no_answer(model):
    driver = model.driver(max_num_batched_tokens=40, max_num_seqs=8, steps_ahead=1)
    driver.add_all(model.asks)
    driver.run()
    num_outputs = sum(map(len, driver.outputs.values()))
    # All but first tokens are computed, and all of those before they are known, but for last ones.
    assert driver.counts["pending tokens"] == num_outputs - len(driver.outputs)
    model.check(driver)


def test_threads_that_share_the_work_change_no_answer(demo):
    driver = demo.driver(
        cpu_threads=2, max_num_batched_tokens=40, max_num_seqs=8, enable_prefix_caching=False
    )
    driver.add_all(demo.asks)
    driver.run()
    assert driver.counts["most rows"] >= 4
    assert driver.counts["chunks"] > 0
    demo.check(driver)
