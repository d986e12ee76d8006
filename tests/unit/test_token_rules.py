"""What an answer has seen, is banned from and may draw, kept up token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.token_rules import BannedTokens, SeenTokens, make_token_rules

IDS = st.lists(st.integers(0, 12), max_size=200)


@pytest.fixture
def rules(make_request):
    """Make the rules of a request: its prompt, and sampling parameters or fields by name."""
    return lambda prompt, **values: make_token_rules(make_request("a", prompt, **values))


def counted(seen: SeenTokens) -> dict[int, int]:
    ids, counts = seen.ids.tolist(), seen.counts.tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, counts, strict=True))


def expected(prompt: list[int], answer: list[int]) -> dict[int, int]:
    return dict.fromkeys(prompt, 0) | Counter(answer)


@given(IDS, IDS, st.integers(1, 200), st.integers(0, 200), IDS)
def test_what_is_seen_is_counted_however_it_comes_and_copies_go_their_own_way(
    prompt, answer, size, forked_at, other
):
    seen = SeenTokens(np.unique(np.array(prompt, np.int64)), len(prompt))
    for end in range(0, min(forked_at, len(answer)), size):
        seen.read(prompt + answer[:end])
    copy, known = seen.copy(), counted(seen)
    assert counted(copy) == known
    seen.read(prompt + answer)
    assert counted(seen) == expected(prompt, answer)
    assert counted(copy) == known
    begun = answer[: sum(known.values())]
    copy.read(prompt + begun + other)
    assert counted(copy) == expected(prompt, begun + other)
    assert counted(seen) == expected(prompt, answer)


def test_the_prompt_is_seen_only_where_repetition_is_penalized(rules):
    assert rules([5, 3, 5], repetition_penalty=1.1).seen.ids.tolist() == [3, 5]
    assert rules([5, 3, 5], presence_penalty=1.0).seen.ids.tolist() == []
    assert rules([5, 3, 5], frequency_penalty=1.0).seen.ids.tolist() == []


def test_who_asks_for_nothing_has_no_rules(rules, make_sequence):
    assert rules([5], top_k=3, temperature=2.0, min_tokens=2, repetition_penalty=1.0) is None
    assert make_sequence("a", 3).rules is None


def test_only_what_depends_on_earlier_tokens_needs_their_names(make_sequence):
    needs = [
        {"repetition_penalty": 0.9},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 1.0},
        {"bad_words_token_ids": ((4,), (5, 6))},
    ]
    needs_not = [
        {},
        {"min_tokens": 3},
        {"logit_bias": {4: 1.0}},
        {"allowed_token_ids": [4]},
        {"bad_words_token_ids": ((4,), (5,))},
    ]
    for values in needs:
        first = make_sequence("a", 3, n=2, **values)
        assert [first.needs_names, first.fork(1).needs_names] == [True, True]
    assert not any(make_sequence("a", 3, **values).needs_names for values in needs_not)


def test_forks_share_what_is_fixed_and_see_for_themselves(make_sequence):
    first = make_sequence("a", [5, 6], n=2, repetition_penalty=2.0, allowed_token_ids=[4, 70])
    first.append_token(7)
    first.rules.seen.read(first.token_ids)
    fork = first.fork(1)
    fork.append_token(8)
    fork.rules.seen.read(fork.token_ids)
    assert fork.rules.allowed is first.rules.allowed
    assert counted(first.rules.seen) == {5: 0, 6: 0, 7: 1}
    assert counted(fork.rules.seen) == {5: 0, 6: 0, 7: 1, 8: 1}


@pytest.mark.parametrize(
    ("token_ids", "banned"),
    [([1], {9}), ([5], {9, 6}), ([4, 5], {9, 6, 7}), ([3, 4, 5], {9, 6, 7, 8}), ([5, 4], {9})],
)
def test_a_sequence_is_banned_where_all_but_its_last_token_stand(token_ids, banned):
    sequences = BannedTokens(((9,), (5, 6), (4, 5, 7), (3, 4, 5, 8)))
    assert set(sequences.after(token_ids)) == banned
    assert sequences.reads_tokens
    assert not BannedTokens(((9,), (8,))).reads_tokens


@pytest.mark.parametrize("ids", [[0], [31], [32], [63, 0], [5, 5, 300, 31, 32, 64]])
def test_a_bitmask_has_the_bits_of_allowed_tokens_and_no_other(rules, ids):
    mask = rules([1], allowed_token_ids=ids).allowed
    assert mask.dtype == np.int32
    assert len(mask) == max(ids) // 32 + 1
    bits = [i for i in range(32 * len(mask)) if int(mask[i // 32]) >> (i % 32) & 1]
    assert bits == sorted(set(ids))
