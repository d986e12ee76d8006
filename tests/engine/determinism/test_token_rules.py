"""What requests say of single tokens holds, to the bit, whatever happens to them meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

#: In turn, for each request.
RULES = (
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {},
    {"repetition_penalty": 0.8, "logit_bias": {20: 2.0, 21: -100.0}},
    {"allowed_token_ids": range(100, 180), "frequency_penalty": 1.0},
)


@pytest.fixture
def asks(tiny):
    """(prompt, parameters, bad words) of requests.

    Some bad words begin in the prompt, some would be the answer's own.
    """
    made = []
    for index, (prompt, params) in enumerate(tiny.asks):
        rules = dict(RULES[index % len(RULES)])
        if "allowed_token_ids" in rules:
            rules["allowed_token_ids"] = list(rules["allowed_token_ids"])
        plain = [token_id for token_id, _ in tiny.alone(tuple(prompt), params, 0)]
        bad_words = ((prompt[-1], plain[0]), (plain[2], plain[3]), (plain[5],))
        made.append((prompt, replace(params, **rules), bad_words if index % 2 == 0 else ()))
    return made


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_chunks_forks_preemption_and_steps_ahead_change_no_bit(tiny, asks, mode, steps_ahead):
    driver = tiny.driver(
        steps_ahead=steps_ahead,
        preemption_mode=mode,
        num_blocks=30,
        num_host_blocks=20,
        max_num_batched_tokens=40,
        max_num_seqs=10,
    )
    for index, (prompt, params, bad_words) in enumerate(asks):
        driver.add(str(index), prompt, params, bad_words_token_ids=bad_words)
    random = Random(mode)

    def preempt_at_random():
        if driver.scheduler.running and random.random() < 0.2:
            driver.preempt(random.choice(driver.scheduler.running))

    driver.run(preempt_at_random)
    assert driver.counts["chunks"] > 0
    assert driver.counts["forks"] > 0
    assert driver.engine.stats().num_preemptions_total > 10
    tiny.check(driver)
    check_rules(driver)


def check_rules(driver) -> None:
    """Check what can be told of answers by themselves."""
    for name, index in driver.outputs:
        request, answer = driver.requests[name], driver.tokens(name, index)
        allowed = request.params.allowed_token_ids
        assert allowed is None or set(answer) <= set(allowed)
        assert 21 not in answer or not request.params.logit_bias
        pairs = set(pairwise([request.prompt_token_ids[-1], *answer]))
        banned = {words for words in request.bad_words_token_ids if len(words) == 2}
        assert not pairs & banned
        assert not {words[0] for words in request.bad_words_token_ids if len(words) == 1} & {
            *answer
        }


def test_penalties_make_answers_less_repetitive(tiny):
    prompt, params = tiny.asks[0]
    driver = tiny.driver()
    for name, penalty in (("plain", 0.0), ("penalized", 2.0)):
        kinds = {"frequency_penalty": penalty, "presence_penalty": penalty}
        driver.add(name, prompt, replace(params, max_tokens=200, **kinds))
    driver.run()
    kinds = {name: len(set(driver.tokens(name))) for name in ("plain", "penalized")}
    assert kinds["penalized"] > kinds["plain"]
    driver.add("again", prompt, replace(params, max_tokens=200))
    driver.run()
    assert driver.trace("again") == driver.trace("plain")
