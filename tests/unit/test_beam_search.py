"""Which beams live on, which become answers, and when a search is over; scores are made up."""

from __future__ import annotations

import pytest

from octavo.beam_search import BeamRules, BeamSearch, Continuation
from octavo.request import FinishReason, TokenLogprob, TokenLogprobs

EOS = 0
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def make_search(width: int = 2, length_penalty: float = 1.0, **limits) -> BeamSearch:
    values = {"min_tokens": 0, "max_tokens": 9, **limits}
    return BeamSearch(BeamRules(width, length_penalty, frozenset({EOS}), **values))


def likely(**logprobs: float) -> TokenLogprobs:
    """Make candidates `t5=-1.0` in falling order; equals share a rank."""
    ranks = [1 + sum(other > own for other in logprobs.values()) for own in logprobs.values()]
    return tuple(
        TokenLogprob(int(name[1:]), logprob, rank)
        for (name, logprob), rank in zip(logprobs.items(), ranks, strict=True)
    )


NOTHING = likely(t1=-50.0, t2=-51.0, t3=-52.0)


def advance(search: BeamSearch, *candidates: TokenLogprobs) -> list[Continuation]:
    all_known = [search.offer(slot, each) for slot, each in enumerate(candidates)]
    assert all_known == [False] * (len(candidates) - 1) + [True]
    return search.advance()


def test_at_first_all_beams_come_of_the_prompt_alone():
    search = make_search()
    continuations = advance(search, likely(t5=-1.0, t6=-2.0, t7=-3.0), likely(t8=-0.1))
    assert continuations == [Continuation(0, 0, 5), Continuation(1, 0, 6)]


def test_a_beam_that_lives_on_keeps_its_slot_and_branches_take_those_of_others():
    search = make_search(width=3)
    advance(search, likely(t5=-1.0, t6=-2.0, t7=-3.0, t8=-9.0), NOTHING, NOTHING)
    found = advance(search, NOTHING, likely(t1=-0.1, t2=-0.2), likely(t4=-1.0))
    assert found == [Continuation(1, 1, 1), Continuation(0, 1, 2), Continuation(2, 2, 4)]


def test_candidates_may_come_in_any_order():
    search = make_search()
    found = advance(search, likely(t7=-3.0, t6=-2.0, t5=-1.0), NOTHING)
    assert [each.token_id for each in found] == [5, 6]


def test_of_equals_the_better_beam_goes_first_then_the_lower_id():
    search = make_search(width=3)
    advance(search, likely(t5=-1.0, t6=-2.0, t7=-3.0), NOTHING, NOTHING)
    found = advance(search, likely(t9=-3.0, t8=-3.0), likely(t4=-2.0), likely(t3=-1.0))
    assert found == [Continuation(0, 0, 8), Continuation(2, 0, 9), Continuation(1, 1, 4)]


def test_an_end_among_the_best_is_an_answer_and_others_go_on():
    search = make_search(max_tokens=2)
    found = advance(search, likely(t0=-0.5, t5=-1.0, t6=-2.0), NOTHING)
    assert [each.token_id for each in found] == [5, 6]
    assert advance(search, likely(t7=-0.2, t8=-4.0), NOTHING) == []
    best, second = search.best(2)
    assert (best.token_ids, best.score, best.finish_reason) == ((0,), -0.5, STOP)
    assert (second.token_ids, second.finish_reason) == ((5, 7), LENGTH)
    assert second.score == pytest.approx(-0.6)


def test_an_end_that_is_not_among_the_best_is_none():
    search = make_search(max_tokens=2)
    advance(search, likely(t5=-1.0, t6=-2.0, t0=-3.0), NOTHING)
    advance(search, likely(t7=-0.1, t8=-9.0), likely(t7=-0.1))
    assert [answer.token_ids for answer in search.best(2)] == [(5, 7), (6, 7)]


def test_a_search_is_over_when_no_beam_could_displace_an_answer():
    search = make_search()
    advance(search, likely(t0=-0.5, t5=-3.0, t6=-4.0), NOTHING)
    assert advance(search, likely(t0=-0.5, t1=-0.6, t2=-0.7), NOTHING) == []
    assert [answer.token_ids for answer in search.best(2)] == [(0,), (5, 0)]
    assert [answer.score for answer in search.best(2)] == [-0.5, -1.75]


def test_a_search_goes_on_while_a_beam_could_displace_an_answer():
    search = make_search()
    advance(search, likely(t0=-0.5, t5=-3.0, t6=-4.0), NOTHING)
    assert advance(search, likely(t1=-0.1, t0=-0.5, t2=-0.7), NOTHING)
    assert advance(search, likely(t0=-0.1, t1=-9.0, t2=-9.5), NOTHING) == []
    assert [answer.token_ids for answer in search.best(2)] == [(0,), (5, 1, 0)]


@pytest.mark.parametrize(
    ("length_penalty", "best"), [(0.0, (0,)), (1.0, (5, 0)), (-1.0, (0,)), (10.0, (5, 0))]
)
def test_a_length_penalty_above_0_favours_long_answers(length_penalty, best):
    search = make_search(length_penalty=length_penalty, max_tokens=2)
    advance(search, likely(t0=-1.0, t5=-1.1, t6=-4.0), NOTHING)
    advance(search, likely(t0=-0.1, t1=-0.2), NOTHING)
    assert search.best(1)[0].token_ids == best


def test_ends_do_not_count_before_min_tokens():
    search = make_search(min_tokens=1)
    found = advance(search, likely(t0=-0.1, t5=-1.0, t6=-2.0), NOTHING)
    assert [each.token_id for each in found] == [5, 6]
    advance(search, likely(t0=-0.1, t1=-0.2, t2=-0.3), NOTHING)
    assert [answer.token_ids for answer in search.best(2)] == [(5, 0)]


def test_few_tokens_give_fewer_beams_which_become_more_again():
    search = make_search(width=3)
    found = advance(search, likely(t0=-1.0, t1=-1.1, t2=-1.2), NOTHING, NOTHING)
    assert found == [Continuation(0, 0, 1), Continuation(1, 0, 2)]
    found = advance(search, likely(t0=-3.0, t1=-1.1, t2=-1.2), likely(t0=-3.0, t1=-0.9, t2=-1.3))
    assert found == [Continuation(1, 1, 1), Continuation(0, 0, 1), Continuation(2, 0, 2)]


def test_a_search_is_over_when_every_token_ends():
    rules = BeamRules(2, 1.0, frozenset({0, 1, 2}), min_tokens=0, max_tokens=9)
    search = BeamSearch(rules)
    assert rules.num_candidates == 5
    assert advance(search, likely(t0=-1.0, t1=-1.1, t2=-1.2), NOTHING) == []
    assert [answer.token_ids for answer in search.best(2)] == [(0,), (1,)]


def test_answers_tell_the_most_likely_tokens_at_each_place():
    search = make_search(max_tokens=1, num_logprobs=2)
    candidates = likely(t5=-1.0, t6=-2.0, t7=-3.0)
    advance(search, candidates, NOTHING)
    five, six, _ = candidates
    assert [answer.logprobs for answer in search.best(2)] == [((five, six),), ((six, five),)]


def test_a_beam_may_be_long():
    search = make_search(max_tokens=100_000)
    advance(search, likely(t5=-1.0, t6=-2.0), NOTHING)
    for _ in range(99_999):
        advance(search, likely(t5=-0.1, t6=-0.2), NOTHING)
    assert search.best(1)[0].token_ids == (5,) * 100_000
