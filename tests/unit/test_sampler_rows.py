"""The bits of a row's token and log-probability depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.sampler import sample
from octavo.scheduler.output import SampledToken

END = 3
FILTERS = [
    {},
    {"temperature": 3.0},
    {"temperature": 1e-3},
    {"top_k": 5},
    {"top_k": 700},
    {"top_p": 0.6},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1e-4},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 700, "top_p": 0.5, "min_p": 1e-3},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.fixture
def draw(make_sequence) -> Callable[..., list[SampledToken]]:
    """Sample rows of logits; `params` is one dict for all rows, or one each. Logits are kept."""

    def draw_rows(logits: torch.Tensor, params, num_tokens=None) -> list[SampledToken]:
        each = [params] * len(logits) if isinstance(params, dict) else params
        lengths = num_tokens or [5] * len(each)
        sequences = [
            make_sequence("a", length, **values)
            for length, values in zip(lengths, each, strict=True)
        ]
        return list(
            sample(logits.clone(), build_sampling_batch(sequences, lambda _: {END})).tokens()
        )

    return draw_rows


def spread_out(vocab: int, spread: float, seed: int = 1) -> torch.Tensor:
    """Return [vocab] float32 logits from 0 to `spread`, all different, in no order."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    return torch.linspace(0.0, spread, vocab)[order]


def test_greedy_is_the_first_of_the_best(draw):
    logits = torch.zeros(4, 301)
    logits[1, 200:] = 1.0
    logits[2, 300] = 1.0
    logits[3] = spread_out(301, 9.0)
    drawn = draw(logits, {"temperature": 0})
    assert [token.token_id for token in drawn] == [0, 200, 300, int(logits[3].argmax())]


def test_greedy_needs_no_seed_and_random_neighbours_change_nothing(draw):
    logits = torch.stack([spread_out(331, 9.0, seed) for seed in range(4)])
    greedy, random = {"temperature": 0}, {"temperature": 2.0, "top_k": 9}
    mixed = draw(logits, [greedy, random, greedy, random])
    assert [mixed[0], mixed[2]] == draw(logits[[0, 2]], greedy)
    assert [mixed[1], mixed[3]] == draw(logits[[1, 3]], random)


ROW_PARAMS = [
    {"logprobs": seed % 4, "seed": seed, **filters}
    for seed, filters in enumerate([*FILTERS, {"temperature": 0}])
]


@pytest.fixture
def rows() -> tuple[torch.Tensor, list[int]]:
    """Logits and lengths for `ROW_PARAMS`: some peaked, some flat, of an odd vocabulary."""
    generator = torch.Generator().manual_seed(2)
    spread = torch.tensor([0.01, 1.0, 3.0]).repeat(len(ROW_PARAMS))[: len(ROW_PARAMS), None]
    logits = spread * torch.randn(len(ROW_PARAMS), 1237, generator=generator)
    return logits, [3 + 7 * row for row in range(len(ROW_PARAMS))]


@pytest.fixture(params=[1, 2])
def num_threads(request) -> Iterator[int]:
    """Run with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(draw, rows, num_threads):
    logits, lengths = rows
    alone = [
        draw(logits[row : row + 1], [ROW_PARAMS[row]], [lengths[row]])[0]
        for row in range(len(logits))
    ]
    for seed in range(4):
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed)).tolist()
        batched = draw(
            logits[order], [ROW_PARAMS[row] for row in order], [lengths[row] for row in order]
        )
        assert batched == [alone[row] for row in order]


def test_the_number_of_threads_changes_no_bit(draw, rows):
    logits, lengths = rows
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn.append(draw(logits.repeat(8, 1), ROW_PARAMS * 8, lengths * 8))
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1]
    assert drawn[0] == drawn[0][: len(logits)] * 8


def test_a_seed_and_a_position_decide_the_token(draw):
    logits = spread_out(997, 0.5).repeat(64, 1)
    params = [{"seed": seed} for seed in range(64)]
    first = draw(logits, params)
    assert draw(logits, params) == first
    assert len({token.token_id for token in first}) > 50
    moved = draw(logits, params, [6] * 64)
    assert sum(a == b for a, b in zip(first, moved, strict=True)) < 4
    positions = draw(logits, {"seed": 1}, list(range(1, 65)))
    assert len({token.token_id for token in positions}) > 50


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ends_are_not_drawn_before_min_tokens(draw, temperature):
    logits = torch.zeros(200, 50)
    logits[:, END] = 20.0
    params = [{"temperature": temperature, "min_tokens": 1, "seed": seed} for seed in range(200)]
    assert END not in {token.token_id for token in draw(logits, params)}
    for values in params:
        values["min_tokens"] = 0
    assert {token.token_id for token in draw(logits, params)} == {END}


def test_ends_are_masked_in_the_inference_tensors_of_the_decoder(make_sequence):
    with torch.inference_mode():
        logits = torch.tensor([[0.0, 2.0, 1.0]])
    sequence = make_sequence("a", 5, min_tokens=1, temperature=0)
    assert sample(logits, build_sampling_batch([sequence], lambda _: {1})).tokens() == (
        SampledToken(2),
    )


def test_min_tokens_counts_output_and_ends_with_it(make_sequence):
    def masked(num_output_tokens):
        sequence = make_sequence("a", 5, min_tokens=2, stop_token_ids=(8, 4))
        for _ in range(num_output_tokens):
            sequence.append_token(9)
        stops = frozenset(sequence.params.stop_token_ids)
        processors = build_sampling_batch([sequence], lambda _: stops).processors
        return None if processors is None else processors.banned.token_ids.tolist()

    assert [masked(n) for n in range(4)] == [[4, 8], [4, 8], None, None]


def test_a_masked_id_outside_the_vocabulary_is_nobodys(make_sequence):
    sequence = make_sequence("a", 5, min_tokens=1, temperature=0)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    batch = build_sampling_batch([sequence], lambda _: frozenset({1, 3, 999_999}))
    assert sample(logits, batch).tokens() == (SampledToken(2),)


def test_the_log_probability_is_the_models_own(draw, rows):
    logits, lengths = rows
    masked = [{**params, "min_tokens": 1} for params in ROW_PARAMS]
    for params in (ROW_PARAMS, masked):
        for row, token in enumerate(draw(logits, params, lengths)):
            distribution = logits[row].double().log_softmax(-1)
            assert token.logprobs[0].token_id == token.token_id
            for token_id, logprob, rank in token.logprobs:
                expected = distribution[token_id].item()
                assert logprob == pytest.approx(expected, rel=1e-6, abs=1e-6)
                assert rank == 1 + (logits[row] > logits[row, token_id]).sum()


def test_the_most_likely_stand_beside_the_drawn_token_each_once(draw, rows):
    logits, lengths = rows
    for row, token in enumerate(draw(logits, ROW_PARAMS, lengths)):
        best = logits[row].topk(ROW_PARAMS[row]["logprobs"]).indices.tolist()
        others = [token_id for token_id in best if token_id != token.token_id]
        assert [each.token_id for each in token.logprobs] == [token.token_id, *others]


def test_more_are_asked_for_than_there_are_tokens(draw):
    (token,) = draw(torch.tensor([[0.5, 2.0, 1.0]]), {"temperature": 0, "logprobs": 20})
    assert [(each.token_id, each.rank) for each in token.logprobs] == [(1, 1), (2, 2), (0, 3)]


def test_masks_change_no_bit_of_a_log_probability(draw, rows):
    logits, lengths = rows
    logits[:, END] = -100.0
    masked = [{**params, "min_tokens": 1} for params in ROW_PARAMS]
    assert draw(logits, masked, lengths) == draw(logits, ROW_PARAMS, lengths)


def test_only_rows_that_ask_get_a_log_probability(draw):
    logits = spread_out(101, 9.0).repeat(4, 1)
    asked = [False, True, False, True]
    params = [{"logprobs": 0 if ask else None, "temperature": i % 2} for i, ask in enumerate(asked)]
    drawn = draw(logits, params)
    assert [token.logprobs is not None for token in drawn] == asked


def test_a_row_from_which_nothing_can_be_drawn_gives_no_token_and_spoils_no_other(draw, rows):
    logits, lengths = rows
    expected = draw(logits, ROW_PARAMS, lengths)
    for row, value in ((0, torch.nan), (5, torch.inf), (12, torch.nan)):
        logits[row, 700] = value
    logits[3] = -torch.inf
    for row, (token, before) in enumerate(
        zip(draw(logits, ROW_PARAMS, lengths), expected, strict=True)
    ):
        assert token.token_id == -1 if row in (0, 3, 5, 12) else token == before


def test_token_ids_stay_where_the_logits_are(make_sequence):
    sequence = make_sequence("a", 5, temperature=0)
    drawn = sample(torch.tensor([[0.0, 2.0]]), build_sampling_batch([sequence], lambda _: set()))
    assert drawn.token_ids.equal(torch.tensor([1]))


def test_no_rows_draw_nothing():
    batch = build_sampling_batch([], lambda _: frozenset())
    assert sample(torch.empty(0, 17), batch).tokens() == ()
