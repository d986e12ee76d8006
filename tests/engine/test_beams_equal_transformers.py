"""Beam search finds what transformers' own finds: the same answers, in the same order."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.sampling_params import SamplingParams

LENGTHS = [1, 16, 17, 65]
TEXTS = ["The capital of France is", "Q: Who wrote Hamlet?\nA:"]


@pytest.fixture(scope="module")
def llama(checkpoints):
    return AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)


def search_with_transformers(model, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    ends = [] if params.ignore_eos else [model.config.eos_token_id]
    ends += params.stop_token_ids
    rows = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=False,
        num_beams=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=False,
        num_return_sequences=params.n,
        eos_token_id=ends or -1,
        pad_token_id=-1,
    )
    return [[id_ for id_ in row[len(prompt) :] if id_ >= 0] for row in rows.tolist()]


@pytest.mark.parametrize(
    ("beam_width", "length_penalty"),
    [(2, -1.0), (2, 1.0), (3, 0.0), (3, 1.0), (4, 1.0), (4, 2.0)],
)
@pytest.mark.parametrize(
    "ends",
    [
        {"ignore_eos": True},
        {},
        {"stop_token_ids": list(range(100, 140))},
        {"stop_token_ids": list(range(60, 300, 3)), "min_tokens": 4},
    ],
    ids=["endless", "eos", "stops", "stops late"],
)
def test_answers_are_those_of_transformers(
    beam_width, length_penalty, ends, llama, make_driver, make_prompts
):
    params = SamplingParams(
        n=beam_width, beam_width=beam_width, length_penalty=length_penalty, max_tokens=12, **ends
    )
    driver = make_driver("llama", dtype="float32", max_num_batched_tokens=48, max_num_seqs=12)
    prompts = make_prompts(LENGTHS)
    driver.add_all([(prompt, params) for prompt in prompts])
    driver.run()
    for name, prompt in enumerate(prompts):
        found = [driver.tokens(str(name), index) for index in range(beam_width)]
        assert found == search_with_transformers(llama, prompt, params)


def test_the_demo_model_finds_what_transformers_finds(checkpoints, make_driver):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["demo"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["demo"])
    driver = make_driver("demo", dtype="float32", max_model_len=128)
    params = SamplingParams(n=2, beam_width=3, max_tokens=8)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    driver.add_all([(prompt, params) for prompt in prompts])
    driver.run()
    for name, prompt in enumerate(prompts):
        found = [driver.tokens(str(name), index) for index in range(2)]
        assert found == search_with_transformers(model, prompt, params), TEXTS[name]
