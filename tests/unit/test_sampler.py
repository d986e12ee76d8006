"""Draws against exact distributions made by transformers' own processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.sampling.batch import RandomRows, build_sampling_batch
from octavo.sampling.sampler import sample


@pytest.fixture
def count(make_sequence) -> Callable[..., torch.Tensor]:
    """Count the tokens that seeds 0, 1, 2 … draw from one row of logits."""

    def count_draws(logits: torch.Tensor, num_draws: int, **params) -> torch.Tensor:
        one = build_sampling_batch([make_sequence("a", 5, **params)], lambda _: frozenset())
        values = {
            field.name: np.repeat(getattr(one.random, field.name), num_draws)
            for field in fields(RandomRows)
        }
        random = replace(RandomRows(**values), seeds=np.arange(num_draws))
        batch = replace(one, num_rows=num_draws, random=random)
        ids = [token.token_id for token in sample(logits.expand(num_draws, -1), batch).tokens()]
        return torch.bincount(torch.tensor(ids), minlength=len(logits))

    return count_draws


def exact_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Return [vocab] float64: what transformers would draw from."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    return processors(None, logits[None].double()).softmax(dim=-1)[0]


def assert_drawn_from(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square with rare tokens pooled; the bound is five standard deviations of the normal."""
    assert counts[probabilities == 0].sum() == 0, "a token outside the kept set was drawn"
    expected = probabilities * counts.sum()
    common = expected >= 8
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, expected = observed[expected > 1e-6], expected[expected > 1e-6]
    freedom = len(expected) - 1
    if freedom == 0:
        assert (probabilities > 0).sum() == 1, "too few draws to tell"
        return
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    # Wilson and Hilferty's cube root makes a chi-square nearly normal.
    spread = 2 / (9 * freedom)
    deviations = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    assert deviations < 5, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


def peaked(vocab: int, seed: int = 0) -> torch.Tensor:
    """Return [vocab] float32 logits that spread as a model's do."""
    return 2.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def flat(vocab: int, spread: float = 0.5) -> torch.Tensor:
    """Return [vocab] float32 logits, nearly equal, all different, in no order."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    return torch.linspace(0.0, spread, vocab)[order]


def power_law(vocab: int) -> torch.Tensor:
    """Return [vocab] float32 logits whose probabilities fall as the root of the rank."""
    return -0.5 * torch.arange(1, vocab + 1).log()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "num_draws"), [(41, 5_000), (331, 2_500)])
def test_draws_follow_the_exact_distribution(count, vocab, num_draws, filters):
    logits = peaked(vocab)
    assert_drawn_from(count(logits, num_draws, **filters), exact_probabilities(logits, **filters))


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 300},
        {"top_p": 0.9},
        {"min_p": 0.051},  # of 0.05, the 400th token would be on the brink
        {"top_k": 500, "top_p": 0.6},
        {"top_k": 500, "min_p": 0.07},
        {"top_k": 500, "top_p": 0.6, "min_p": 0.07},
        {"top_p": 0.3, "min_p": 0.07},
    ],
    ids=str,
)
def test_wide_sets_are_exact(count, filters):
    logits = power_law(701)
    probabilities = exact_probabilities(logits, **filters)
    assert_drawn_from(count(logits, 3_000, **filters), probabilities)


@pytest.mark.parametrize("vocab", [1, 2, 7, 63, 64, 65, 257])
def test_a_vocabulary_of_any_size_is_drawn_from(count, vocab):
    logits = peaked(vocab)
    for filters in ({}, {"top_k": 3}, {"top_k": vocab, "top_p": 0.9, "min_p": 0.01}):
        assert_drawn_from(count(logits, 1_500, **filters), exact_probabilities(logits, **filters))


def test_ties_with_the_kth_are_kept(count):
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    counts = count(logits, 3_000, top_k=2)
    assert_drawn_from(counts, exact_probabilities(logits, top_k=2))
    assert (counts > 0).tolist() == [False, True, True, True, False]


def test_all_tokens_may_tie_with_the_kth(count):
    logits = torch.zeros(400)
    counts = count(logits, 4_000, top_k=2)
    assert_drawn_from(counts, exact_probabilities(logits, top_k=2))


@pytest.mark.parametrize("vocab", [5, 331, 1001])
@pytest.mark.parametrize(
    "filters", [{"top_p": 5e-324}, {"top_p": 1e-30}, {"top_k": 1}, {"temperature": 1e-30}], ids=str
)
def test_the_narrowest_filters_take_the_best_token(count, vocab, filters):
    logits = flat(vocab)
    assert count(logits, 200, **filters)[logits.argmax()] == 200


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits_do_not_overflow(count, size):
    logits = torch.tensor([size, size - 1, size - 50])
    counts = count(logits, 2_000, top_p=0.999)
    assert_drawn_from(counts, exact_probabilities(logits, top_p=0.999))
