"""Beams in the scheduler: held, formed anew and ended, over likelihoods that are made up."""

from __future__ import annotations

from collections import Counter
from functools import cache
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.beam_search import BeamRules, BeamSearch, Hypothesis
from octavo.errors import InvalidRequest, PromptTooLong
from octavo.request import FinishReason, Request, TokenLogprob, TokenLogprobs
from octavo.sequence import PENDING_TOKEN, SequenceStatus

EOS = 0
NUM_TOKENS = 9


@cache
def _likely_after(token_ids: tuple[int, ...]) -> TokenLogprobs:
    logprobs = [-(crc32(bytes([*token_ids, id_])) % 50) / 10 for id_ in range(NUM_TOKENS)]
    return tuple(
        TokenLogprob(id_, own, 1 + sum(other > own for other in logprobs))
        for id_, own in enumerate(logprobs)
    )


def likely_after(token_ids: list[int]) -> TokenLogprobs:
    return _likely_after(tuple(token_ids))


def search_alone(request: Request, max_tokens: int) -> list[Hypothesis]:
    """Return what a search finds that nothing disturbs."""
    params = request.params
    ends = frozenset(() if params.ignore_eos else (EOS,))
    search = BeamSearch(BeamRules(params.beam_width, params.length_penalty, ends, 0, max_tokens))
    beams = {slot: list(request.prompt_token_ids) for slot in range(params.beam_width)}
    while beams:
        for slot, token_ids in beams.items():
            search.offer(slot, likely_after(token_ids))
        moves = search.advance()
        beams = {slot: [*beams[parent], token_id] for slot, parent, token_id in moves}
    return search.best(params.n)


@pytest.fixture
def make_driver(make_scheduler):
    """Make a driver whose beams are told what is likely after their tokens."""

    def make(*args, **options):
        driver = make_scheduler(*args, **options)
        driver.likely_after = likely_after
        return driver

    return make


def test_a_beam_that_has_drawn_is_held_until_all_have(make_driver):
    driver = make_driver(max_num_batched_tokens=2)
    driver.add("a", [1, 2], seed=None, beam_width=2, ignore_eos=True, max_tokens=3)
    assert driver.step() == [("a", 2, 2)]
    driver.scheduler.preempt(driver.scheduler.running[1], driver.now_s)
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 0)]
    held = driver.scheduler.running[0]
    assert held.token_ids[-1] == PENDING_TOKEN
    assert driver.step() == [("a.1", 2, 1)]
    assert PENDING_TOKEN not in held.token_ids


def test_a_held_beam_makes_room_and_comes_back_without_drawing_again(make_driver):
    driver = make_driver(max_num_batched_tokens=3, prefix_caching=False)
    driver.add("a", [1, 2], seed=None, beam_width=3, ignore_eos=True, max_tokens=4)
    driver.step()
    driver.scheduler.preempt(driver.scheduler.running[2], driver.now_s)
    assert driver.step() == [("a", 1, 1), ("a.1", 1, 1), ("a.2", 1, 0)]
    held = driver.scheduler.running[0]
    driver.scheduler.preempt(held, driver.now_s)
    assert held.status is SequenceStatus.WAITING
    assert driver.step() == [("a", 3, 0)]
    assert held in driver.scheduler.running
    assert driver.step() == [("a.2", 2, 1)]
    assert held.num_pending_tokens == 0


def test_the_answers_come_once_at_the_end_and_all_blocks_are_free(make_driver):
    driver = make_driver()
    sequence = driver.add("a", [1, 2, 3], seed=None, beam_width=3, n=2, max_tokens=5)
    outputs = []
    while driver.scheduler.has_unfinished:
        driver.step()
        outputs += driver.outputs
    expected = search_alone(sequence.request, 5)
    assert [(each.index, each.token_ids) for each in outputs] == [
        (index, answer.token_ids) for index, answer in enumerate(expected)
    ]
    assert driver.cache.num_free_blocks == driver.cache.num_blocks


@pytest.mark.parametrize("index", [None, 0, 2])
def test_answers_of_beams_are_aborted_together(index, make_driver):
    driver = make_driver()
    driver.add("a", [1, 2, 3], seed=None, beam_width=3, n=2, ignore_eos=True)
    driver.steps(3)
    assert len(driver.scheduler.finish("a", FinishReason.ABORT, index)) == 3
    assert not driver.scheduler.has_unfinished
    assert driver.cache.num_free_blocks == driver.cache.num_blocks


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_deadline_ends_each_answer_once(num_steps, make_driver):
    driver = make_driver()
    driver.add("a", [1, 2, 3], seed=None, beam_width=4, n=2, ignore_eos=True, deadline_s=1.0)
    driver.steps(num_steps)
    driver.now_s = 1.0
    driver.step()
    ends = [(each.index, each.token_ids, each.finish_reason) for each in driver.outputs]
    assert ends == [(0, (), FinishReason.DEADLINE), (1, (), FinishReason.DEADLINE)]


def test_a_row_from_which_nothing_can_be_drawn_ends_the_request(make_driver):
    driver = make_driver()
    driver.add("a", [1, 2, 3], seed=None, beam_width=3, n=2, ignore_eos=True)
    driver.steps(2)
    driver.step(5, -1, 5)
    assert [(each.index, each.finish_reason) for each in driver.outputs] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    assert not driver.scheduler.has_unfinished
    assert driver.cache.num_free_blocks == driver.cache.num_blocks


def test_beams_that_wait_for_some_that_cannot_come_in_all_make_room(make_driver):
    driver = make_driver(19, "fair", block_size=1)
    for name in ("a", "b"):
        driver.add(name, 5, seed=None, beam_width=2, tenant=name, ignore_eos=True, max_tokens=3)
    assert driver.step() == [("a", 5, 2), ("b", 5, 2)]
    for _, last in (driver.scheduler.running[:2], driver.scheduler.running[2:]):
        driver.scheduler.preempt(last, driver.now_s)
    assert driver.step() == [("a", 1, 1), ("b", 1, 1)]
    assert driver.running == ["a", "b"], "fairness lets nobody in before them"
    assert driver.step() == []
    assert driver.running == []
    assert driver.step() == [("a", 6, 0), ("a.1", 6, 1)]
    driver.steps(9)
    assert not driver.scheduler.has_unfinished


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 8), min_size=1, max_size=9),
        "beam_width": st.sampled_from([1, 2, 3, 4]),
        "max_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "length_penalty": st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        "rank": st.integers(0, 2),
        "at": st.integers(0, 12),
    }
)
disturbances = st.lists(
    st.tuples(st.sampled_from(["preempt", "preempt", "hold", "abort"]), st.integers(0, 50)),
    max_size=40,
)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_answers_are_those_of_an_undisturbed_search(policy, steps_ahead, make_driver):
    happened: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(
        shape=st.tuples(st.integers(4, 24), st.sampled_from([1, 2, 4]), st.integers(0, 12)),
        spare_budget=st.integers(0, 8),
        caching=st.booleans(),
        window=st.sampled_from([None, None, 3]),
        swap_period=st.integers(1, 3),
        asked=st.lists(requests, min_size=1, max_size=5),
        disturbed=disturbances,
    )
    def check(shape, spare_budget, caching, window, swap_period, asked, disturbed):
        num_blocks, block_size, num_host_blocks = shape
        driver = make_driver(
            num_blocks,
            policy,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=caching,
            window=window,
            swap_pays=lambda num_blocks, num_tokens: num_tokens % swap_period == 0,
            max_num_seqs=6,
            max_num_batched_tokens=6 + spare_budget,
        )
        driver.steps_ahead = steps_ahead
        History(driver, asked, disturbed, happened).run()

    check()
    kinds = ("preempted", "swapped", "copies", "answers")
    assert all(happened[kind] for kind in kinds), happened


class History:
    """Some requests, and what is done to them meanwhile."""

    def __init__(self, driver, asked, disturbed, happened: Counter[str]) -> None:
        self.driver = driver
        self.asked = sorted(asked, key=lambda ask: ask["at"])
        self.disturbed = list(disturbed)
        self.happened = happened
        self.found: dict[str, dict[int, tuple[int, ...]]] = {}
        self.sequences = {}
        self.aborted: set[str] = set()

    def run(self) -> None:
        driver = self.driver
        for num_steps in range(600):
            while self.asked and self.asked[0]["at"] <= num_steps:
                self.add(self.asked.pop(0))
            if driver.scheduler.has_unfinished:
                self.step()
            elif not self.asked:
                break
            what, pick = self.disturbed.pop() if self.disturbed else ("", 0)
            self.disturb(what, pick)
        assert not driver.scheduler.has_unfinished, "somebody never ends"
        self.check()

    def add(self, ask) -> None:
        values = {key: value for key, value in ask.items() if key not in ("at", "prompt", "rank")}
        width, name = values["beam_width"], str(len(self.found))
        if width == 1:
            values["length_penalty"] = 1.0
        options = {"n": max(1, width - 1), "seed": None}
        options |= {"priority": ask["rank"], "tenant": str(ask["rank"])}
        self.found[name] = {}
        try:
            self.sequences[name] = self.driver.add(name, ask["prompt"], **values, **options)
        except (InvalidRequest, PromptTooLong):
            self.happened["refused"] += 1

    def step(self) -> None:
        driver = self.driver
        output = driver.plan()
        self.happened["copies"] += len(output.copies.copies)
        driver.run(output)
        for each in driver.outputs:
            answers = self.found[each.request_id]
            is_beam = self.sequences[each.request_id].params.beam_width > 1
            assert not is_beam or (each.finish_reason and each.index not in answers)
            answers[each.index] = answers.get(each.index, ()) + each.token_ids
            self.happened["answers"] += is_beam

    def disturb(self, what: str, pick: int) -> None:
        scheduler = self.driver.scheduler
        if what == "preempt" and scheduler.running:
            victim = scheduler.running[pick % len(scheduler.running)]
            scheduler.preempt(victim, self.driver.now_s)
            self.happened["preempted"] += 1
            self.happened[victim.status.value] += 1
        elif what == "abort" and self.sequences and pick < 10:
            name = list(self.sequences)[pick % len(self.sequences)]
            if scheduler.finish(name, FinishReason.ABORT):
                self.aborted.add(name)
        if what != "hold":
            self.driver.arrive()

    def check(self) -> None:
        cache = self.driver.cache
        assert (cache.num_free_blocks, cache.num_used_host_blocks) == (cache.num_blocks, 0)
        for name, sequence in self.sequences.items():
            if name in self.aborted or sequence.params.beam_width == 1:
                continue
            room = self.driver.scheduler.admission.room_of(sequence) - sequence.num_prompt_tokens
            expected = search_alone(sequence.request, min(sequence.params.max_tokens, room))
            assert self.found[name] == {
                index: answer.token_ids for index, answer in enumerate(expected)
            }
