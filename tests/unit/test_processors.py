"""Logits after all processors against transformers' own, in transformers' order, to the bit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.processor_rows import MaskedRows
from octavo.sampling.processors import apply_processors
from octavo.sampling.sampler import sample

VOCAB = 131
EOS = 3


class CountPenalty:
    """OpenAI's penalties, which transformers does not have."""

    def __init__(self, params, num_prompt_tokens):
        self._params, self._num_prompt_tokens = params, num_prompt_tokens

    def __call__(self, input_ids, scores):
        answer = input_ids[0, self._num_prompt_tokens :]
        counts = torch.bincount(answer, minlength=scores.shape[1]).float()
        scores = scores - self._params.frequency_penalty * counts
        return torch.where(counts > 0, scores - self._params.presence_penalty, scores)


def by_transformers(sequence) -> LogitsProcessorList:
    """Return what transformers' `generate` makes of a sequence's parameters, in its order."""
    params, num_prompt_tokens = sequence.params, sequence.num_prompt_tokens
    bad_words = [list(ids) for ids in sequence.request.bad_words_token_ids]
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases = {(token_id,): bias for token_id, bias in params.logit_bias}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(CountPenalty(params, num_prompt_tokens))
    if bad_words:
        processors.append(NoBadWordsLogitsProcessor(bad_words, EOS))
    processors.append(MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, EOS))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1))
    return processors


def expected(sequence, logits: torch.Tensor) -> torch.Tensor:
    """Return [vocab] float32."""
    return by_transformers(sequence)(torch.tensor([sequence.token_ids]), logits[None].clone())[0]


def process(sequences, logits: torch.Tensor) -> torch.Tensor:
    """Return [rows, vocab] float32."""
    out = logits.clone()
    processors = build_sampling_batch(sequences, lambda _: frozenset({EOS})).processors
    if processors is not None:
        apply_processors(out, processors)
    return out


@pytest.fixture
def make_random(make_sequence):
    """Make a sequence that asks for some processors at random, over few tokens."""

    def make(random: Random):
        def tokens(count, low=4):
            return [random.randrange(low, VOCAB) for _ in range(count)]

        prompt = random.choices(tokens(9), k=random.randrange(1, 30))
        bad_words = [tokens(1), random.sample(prompt, 1) + tokens(1), [*prompt[-2:], *tokens(1)]]
        choices = {
            "repetition_penalty": random.choice([0.5, 1.1, 1.3, 5.0]),
            "presence_penalty": random.uniform(-2, 2),
            "frequency_penalty": random.uniform(-2, 2),
            "logit_bias": {token_id: random.uniform(-100, 100) for token_id in tokens(6, low=0)},
            "allowed_token_ids": tokens(random.choice([9, 40]), low=0),
            "bad_words_token_ids": tuple(map(tuple, bad_words)),
            "min_tokens": random.randrange(4),
        }
        asked = {key: value for key, value in choices.items() if random.random() < 0.5}
        return make_sequence("a", prompt, temperature=0, **asked)

    return make


@pytest.mark.parametrize("seed", range(20))
def test_every_step_of_a_batch_equals_transformers_row_by_row(make_random, seed):
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences = [make_random(random) for _ in range(9)]
    for _ in range(8):
        logits = 5.0 * torch.randn(len(sequences), VOCAB, generator=generator)
        processed = process(sequences, logits)
        for sequence, row, before in zip(sequences, processed, logits, strict=True):
            # A count times its penalty may be rounded apart from the difference, or with it.
            slack = 1e-6 if sequence.params.frequency_penalty else 0.0
            torch.testing.assert_close(row, expected(sequence, before), rtol=slack, atol=slack)
        for sequence in sequences:
            # Often a token that it has seen.
            token_id = random.choice([*sequence.token_ids, random.randrange(VOCAB)])
            sequence.append_token(token_id)


def test_a_row_has_the_same_bits_alone_as_in_any_batch(make_random):
    random = Random(5)
    sequences = [make_random(random) for _ in range(12)]
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(5))
    together = process(sequences, logits)
    for row, sequence in enumerate(sequences):
        assert process([sequence], logits[row : row + 1])[0].equal(together[row])
    order = list(range(len(sequences)))
    random.shuffle(order)
    assert process([sequences[row] for row in order], logits[order]).equal(together[order])


def test_rows_that_ask_for_nothing_keep_every_bit(make_sequence):
    plain = make_sequence("a", 5, temperature=0)
    all_kinds = {
        "repetition_penalty": 2.0,
        "logit_bias": {1: 5.0},
        "allowed_token_ids": [1, 2],
        "bad_words_token_ids": ((1,),),
        "min_tokens": 1,
    }
    asking = make_sequence("b", 5, temperature=0, **all_kinds)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    processed = process([plain, asking, plain], logits)
    assert processed[[0, 2]].equal(logits[[0, 2]])
    assert not processed[1].equal(logits[1])
    assert build_sampling_batch([plain, plain], lambda _: frozenset({EOS})).processors is None


def test_log_probabilities_are_those_before_any_processor(make_sequence):
    asking = {"temperature": 0, "logprobs": 3}
    rules = [
        {},
        {"repetition_penalty": 3.0},
        {"logit_bias": {7: 50.0}},
        {"allowed_token_ids": [7], "logprobs": 0},
        {"bad_words_token_ids": ((11,), (12,))},
    ]
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    row[[11, 12, 13]] = torch.tensor([4.0, 5.0, 6.0])
    sequences = [make_sequence("a", [13, 11], **{**asking, **values}) for values in rules]
    batch = build_sampling_batch(sequences, lambda _: frozenset())
    tokens = sample(row.repeat(len(rules), 1), batch).tokens()
    assert [token.token_id for token in tokens] == [13, 12, 7, 7, 13]
    exact = row.double().log_softmax(-1)
    for token, count in zip(tokens, (3, 3, 3, 0, 3), strict=True):
        best = dict.fromkeys([token.token_id, *[13, 12, 11][:count]])
        assert [each.token_id for each in token.logprobs] == list(best)
        for each in token.logprobs:
            assert each.logprob == pytest.approx(exact[each.token_id].item(), abs=1e-5)


def test_long_histories_are_not_read_again(make_sequence):
    class CountedList(list):
        num_read = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            self.num_read += len(found) if isinstance(index, slice) else 1
            return found

    sequence = make_sequence("a", 5000, repetition_penalty=1.5)
    sequence.token_ids = CountedList(sequence.token_ids)
    logits = torch.zeros(1, 6000)
    for _ in range(10):
        process([sequence], logits)
        sequence.append_token(7)
    assert sequence.token_ids.num_read == 9


BANS = [
    {"bad_words_token_ids": ((5,), (7,))},
    {"bad_words_token_ids": ((10, 5), (8, 9, 10, 7), (7,))},
    {"allowed_token_ids": [i for i in range(40) if i not in (5, 7)]},
    {"logit_bias": {5: -100, 7: -100}},
    {"min_tokens": 3, "stop_token_ids": (5, 7)},
]


FILTERS = [
    ({"temperature": 0}, {6}),
    ({"temperature": 3.0, "top_k": 2}, {6, 30}),
    ({}, set(range(40)) - {5, 7}),
]


@pytest.mark.parametrize("values", BANS, ids=lambda values: next(iter(values)))
@pytest.mark.parametrize(("filters", "kept"), FILTERS, ids=["greedy", "top-k", "all"])
def test_banned_tokens_are_never_drawn_and_the_others_are(make_sequence, values, filters, kept):
    logits = torch.zeros(2000, 40)
    logits[:, [5, 7]] = 9.0
    logits[:, 30] = 2.9
    logits[:, 6] = 3.0
    sequences = [make_sequence("a", [8, 9, 10], seed=i, **values, **filters) for i in range(2000)]
    batch = build_sampling_batch(sequences, lambda s: frozenset(s.params.stop_token_ids))
    assert {token.token_id for token in sample(logits, batch).tokens()} == kept


def test_a_row_that_rules_out_every_token_gives_none(make_sequence):
    sequence = make_sequence("a", 3, allowed_token_ids=[5], bad_words_token_ids=((5,),))
    other = make_sequence("b", 3, temperature=0)
    logits = torch.zeros(2, 40)
    batch = build_sampling_batch([sequence, other], lambda _: frozenset())
    assert [token.token_id for token in sample(logits, batch).tokens()] == [-1, 0]


def test_a_form_allows_only_what_the_other_rules_leave(make_sequence):
    rules = [
        {},
        {"allowed_token_ids": [4, 6, 7]},
        {"bad_words_token_ids": ((7,), (6, 2))},
        {"allowed_token_ids": [6, 7], "bad_words_token_ids": ((10, 7),)},
        {"logit_bias": {5: 100.0}},
        {"allowed_token_ids": [5], "bad_words_token_ids": ((5,),)},
        {"allowed_token_ids": [4]},
    ]
    sequences = [make_sequence("a", [10], temperature=0, **values) for values in rules]
    # All but the first follow a form that goes on with 5, 6 or 7.
    words = np.full((len(rules) - 1, 2), [0b1110_0000, 0], np.int32)
    form = MaskedRows(np.arange(1, len(rules)), words)
    batch = build_sampling_batch(sequences, lambda _: frozenset(), form)
    logits = torch.arange(40.0).repeat(len(rules), 1)
    drawn = [token.token_id for token in sample(logits, batch).tokens()]
    assert drawn == [39, 7, 6, 6, 5, -1, -1]


def test_ids_that_the_model_does_not_have_are_nobodys(make_sequence):
    sequence = make_sequence(
        "a", [500, 3], repetition_penalty=2.0, bad_words_token_ids=((500,), (1,))
    )
    logits = torch.ones(2, 4)
    processed = process([sequence, make_sequence("b", 3)], logits)
    assert processed.tolist() == [[1.0, -torch.inf, 1.0, 0.5], [1.0] * 4]
