"""Greedy output is transformers' own, token for token in float32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.sampling_params import SamplingParams

LENGTHS = [
    1,
    2,
    3,
    5,
    8,
    13,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    40,
    47,
    48,
    50,
    63,
    64,
    65,
    90,
    128,
    150,
    200,
]
NUM_TOKENS = 24

DEMO_PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils at",
    "The quick brown fox",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "Q: Who wrote Hamlet?\nA:",
    "import numpy as np\n\n",
    "In the beginning",
    "The largest planet in our solar system is",
    "Hello",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "La capitale de la France est",
    "A",
    "The three primary colours are",
    "To make bread, you need flour,",
    "E = mc^2 means that",
    "Monday, Tuesday, Wednesday,",
    "She opened the door and " * 8,
    "It was the best of times, it was the worst of times, " * 6,
    "A long list of words: " + "apple, pear, plum, " * 30,
]


def best_tokens(model, prompt: list[int], answer: list[int]) -> list[int]:
    """Return transformers' most likely token after the prompt and after each token of an answer.

    An answer that is made of these is the one that transformers generates, in one forward pass.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def check_answer(model, prompt: list[int], answer: list[int], num_tokens=NUM_TOKENS) -> None:
    assert answer == best_tokens(model, prompt, answer)
    eos = model.generation_config.eos_token_id
    assert eos not in answer[:-1]
    assert answer[-1] == eos or len(answer) == num_tokens


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny_checkpoints_answer_24_prompts_as_transformers_does(
    family, checkpoints, make_driver, make_prompts
):
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
    driver = make_driver(family, dtype="float32", max_num_batched_tokens=96, max_num_seqs=16)
    prompts = make_prompts(LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    driver.run()
    for index, prompt in enumerate(prompts):
        check_answer(model, prompt, driver.tokens(str(index)))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_answer_as_in_transformers_through_chunks_and_preemptions(
    family, checkpoints, make_driver, make_prompts
):
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "preemption_mode": "recompute"}
    driver = make_driver(family, dtype="float32", **options)
    prompts = make_prompts([1, 16, 33, 47, 90])
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        driver.add(str(index), prompt, params)

    def preempt() -> None:
        for sequence in list(driver.scheduler.running) if driver.now_s in (4, 8) else ():
            driver.preempt(sequence)

    driver.run(preempt)
    assert driver.counts["chunks"] > 0
    assert driver.engine.stats().num_preemptions_total > len(prompts)
    model.generation_config.eos_token_id = None
    for index, prompt in enumerate(prompts):
        check_answer(model, prompt, driver.tokens(str(index)), 8)


def test_the_demo_model_answers_24_prompts_as_transformers_does(checkpoints, make_driver):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["demo"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["demo"])
    driver = make_driver("demo", dtype="float32", max_model_len=512)
    prompts = [tokenizer(text)["input_ids"] for text in DEMO_PROMPTS]
    assert len(prompts) == 24
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    driver.run()
    for index, prompt in enumerate(prompts):
        check_answer(model, prompt, driver.tokens(str(index)))
