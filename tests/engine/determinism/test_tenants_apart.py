"""Requests of different salts find nothing of each other's, whatever computed it and where it lies.

What may be found is counted in hit tokens; a request's own salt finds it, so it was there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.sampling_params import SamplingParams

PROMPT = list(range(20, 84))
#: Full blocks of 16 before the last token of the prompt, which is always computed.
FOUND = 48
KINDS = {
    "one answer": SamplingParams(max_tokens=20, seed=1, ignore_eos=True, logprobs=0),
    "several answers": SamplingParams(n=3, max_tokens=20, seed=1, ignore_eos=True),
    "beams": SamplingParams(n=2, beam_width=4, max_tokens=20, ignore_eos=True),
}


@pytest.fixture
def small(load_model):
    return load_model("llama", "float32")


@pytest.fixture
def ask():
    """Return a function that runs one request and gives the tokens it found in the cache."""

    def run(driver, name, prompt, params, **values):
        before = driver.num_hit_tokens
        driver.add(name, prompt, params, **values)
        driver.run()
        return driver.num_hit_tokens - before

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_salt_finds_its_own_prompts_and_nobody_elses(kind, small, ask):
    driver, params = small.driver(), KINDS[kind]
    found = {
        name: ask(driver, name, PROMPT, params, cache_salt=salt)
        for name, salt in {"a": "a", "b": "b", "none": "", "a longer": "a ", "b again": "b"}.items()
    }
    assert found == {"a": 0, "b": 0, "none": 0, "a longer": 0, "b again": FOUND}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_found_by_their_own_salt_only(kind, small, ask):
    driver, params = small.driver(), KINDS[kind]
    ask(driver, "a", PROMPT, params, cache_salt="a")
    follow_up = [*PROMPT, *driver.tokens("a"), 9, 8, 7]
    once = replace(params, n=1, beam_width=1, max_tokens=1)
    assert ask(driver, "b", follow_up, once, cache_salt="b") == 0
    assert ask(driver, "nobody", follow_up, once) == 0
    # 64 of the prompt and 19 of the answer that were computed are 5 full blocks.
    assert ask(driver, "a again", follow_up, once, cache_salt="a") == 80


def test_what_lies_on_the_host_is_found_by_its_own_salt_only(small, ask):
    driver = small.driver(num_blocks=13, num_host_blocks=100, delay=1)
    params = KINDS["one answer"]
    ask(driver, "a", PROMPT, params, cache_salt="a")
    filler = [8, 9] * 100
    ask(driver, "filler", filler, replace(params, max_tokens=1), cache_salt="filler")
    assert ask(driver, "b", PROMPT, params, cache_salt="b") == 0
    ask(driver, "filler again", filler[::-1], replace(params, max_tokens=1), cache_salt="filler")
    before = driver.counts["host hit tokens"]
    assert ask(driver, "a again", PROMPT, params, cache_salt="a") == FOUND
    assert driver.counts["host hit tokens"] > before


def test_requests_that_run_side_by_side_share_only_within_a_salt(small):
    driver = small.driver(max_num_batched_tokens=64)
    for index in range(6):
        driver.add(str(index), PROMPT, KINDS["one answer"], cache_salt="ab"[index % 2])
    driver.run()
    assert driver.num_hit_tokens == 4 * FOUND
    small.check(driver)


def test_a_tenant_by_itself_is_no_salt(small, ask):
    driver, params = small.driver(scheduling_policy="fair"), KINDS["one answer"]
    assert ask(driver, "a", PROMPT, params, tenant="a") == 0
    assert ask(driver, "b", PROMPT, params, tenant="b") == FOUND


def test_salts_that_look_like_others_are_their_own(small, ask):
    driver, params = small.driver(), replace(KINDS["one answer"], max_tokens=1)
    salts = ["", "\0", "\0\0", "a", "A", "á", "a\u0301", "x" * 255, "x" * 256, "\ud83d"]
    assert [
        ask(driver, str(index), PROMPT, params, cache_salt=salt) for index, salt in enumerate(salts)
    ] == [0] * len(salts)
