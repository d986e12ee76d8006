"""Log-probabilities of new tokens and of prompts are the model's own."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.executor.prompt_scores import PIECE_ROWS
from octavo.model.decoder import Decoder
from octavo.model.loader import load_model
from octavo.request import FinishReason, Request
from octavo.sampling_params import SamplingParams

#: Sums are taken in another order than transformers takes them: of 331 logits up to 30, in float32.
TOLERANCE = 2e-4


@pytest.fixture(scope="session")
def distribution(checkpoints):
    """Return log_softmax [tokens, vocab] of all places of a text, as transformers computes it."""

    @cache
    def load(family: str):
        return AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)

    @torch.inference_mode()
    def compute(family: str, token_ids: list[int]) -> torch.Tensor:
        return load(family)(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return compute


def assert_of(places, row_distributions, token_ids, k: int) -> None:
    """Check places against the distributions they were drawn from."""
    assert len(places) == len(token_ids)
    for place, expected, token_id in zip(places, row_distributions, token_ids, strict=True):
        own, *others = place
        assert own.token_id == token_id
        assert {own.rank, *(each.rank for each in others)} >= set(range(1, k + 1))
        assert len(others) == k - (own.rank <= k)
        for each in place:
            assert each.logprob == pytest.approx(expected[each.token_id].item(), abs=TOLERANCE)
            gaps = expected - expected[each.token_id]
            assert (gaps > TOLERANCE).sum() < each.rank <= 1 + (gaps > -TOLERANCE).sum()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_they_are_the_log_softmax_of_transformers(family, make_driver, make_prompts, distribution):
    driver = make_driver(family, dtype="float32", max_num_batched_tokens=48, max_num_seqs=8)
    prompts = make_prompts([1, 2, 33, 70])
    for index, prompt in enumerate(prompts):
        values = {"temperature": 0.8 * index, "seed": index, "ignore_eos": True, "max_tokens": 6}
        params = SamplingParams(**values, logprobs=index, prompt_logprobs=3 - index)
        driver.add(str(index), prompt, params)
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        expected = distribution(family, prompt + tokens)
        places = [place for _, place in driver.trace(str(index))]
        assert_of(places, expected[len(prompt) - 1 :][: len(tokens)], tokens, index)
        scored = driver.prompt_logprobs(str(index))
        assert_of(scored, expected[: len(prompt) - 1], prompt[1:], 3 - index)


PARAMS = SamplingParams(
    temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=2, seed=0
)


class PoisonedDecoder(Decoder):
    """A model whose logits of the fourth row of a step are not finite."""

    def project(self, states, rows, out=None):
        logits = super().project(states, rows, out)
        return torch.where((rows == 3)[:, None], math.nan, logits)


class CountingDecoder(Decoder):
    """A model that counts the rows of logits it makes at a time."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.sizes: list[int] = []

    def project(self, states, rows, out=None):
        self.sizes.append(len(rows))
        return super().project(states, rows, out)


@pytest.fixture
def run_over(checkpoints, make_prompts):
    """Run a request for a scored prompt on tiny llama, over a decoder of some class."""

    def run(decoder_class: type[Decoder], num_tokens: int):
        decoders = []

        def load(config):
            model = load_model(config)
            decoder = decoder_class(model.spec, model.decoder.weights, model.attention)
            decoders.append(decoder)
            return replace(model, decoder=decoder)

        options = {"num_kv_blocks": 64, "swap_space_bytes": 0, "cpu_threads": 1}
        config = EngineConfig(str(checkpoints["llama"]), **options)
        engine = Engine(config, ModelRunner(config, load=load))
        engine.add(Request("a", tuple(make_prompts([num_tokens])[0]), PARAMS))
        return engine, decoders[0]

    return run


def test_a_prompt_with_a_row_that_is_not_finite_ends_with_an_error(run_over):
    engine, _ = run_over(PoisonedDecoder, 40)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step().outputs
        engine.check_integrity()
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert str(outputs[0].error) == "the model's logits are not finite"
    assert engine.stats().num_cached_blocks == 0


def test_no_more_rows_of_logits_exist_at_a_time_than_a_piece_has(run_over):
    engine, decoder = run_over(CountingDecoder, 400)
    decoder.sizes.clear()
    while engine.has_unfinished:
        engine.step()
    assert max(decoder.sizes) == PIECE_ROWS
    assert sum(decoder.sizes) == 399 + PARAMS.max_tokens
