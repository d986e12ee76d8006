"""Every native family says what transformers says: the same tokens, nearly so in bfloat16."""

from __future__ import annotations

import pytest
import torch
from benchmarks.tiny_image_models import IMAGES
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from octavo.sampling_params import SamplingParams

FAMILIES = (
    "smollm3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "olmo3",
    "stablelm",
    "stablelm with norms of heads",
    *IMAGES,
)
LENGTHS = [1, 17, 40, 64, 90]
SMALL_STEPS = {"max_num_seqs": 16, "max_num_batched_tokens": 48}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def reference(checkpoints, family):
    """Load transformers' own model of the family in a dtype."""

    def load(dtype):
        factory = AutoModelForImageTextToText if family in IMAGES else AutoModelForCausalLM
        return factory.from_pretrained(checkpoints[family], dtype=dtype)

    return load


@torch.inference_mode()
def logprobs_of(model, prompt, tokens):
    """Return the log-probabilities of what may stand in the place of each token of an answer."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float().log_softmax(-1)


def test_greedy_tokens_are_transformers_own_through_chunks_batches_and_preemptions(
    family, make_driver, make_prompts, reference
):
    driver = make_driver(family, dtype="float32", cpu_threads=1, **SMALL_STEPS)
    prompts, running = make_prompts(LENGTHS), driver.scheduler.running

    def preempt():
        if driver.now_s % 4 == 0 and running:
            driver.preempt(running[-1])

    driver.add_all([(prompt, GREEDY) for prompt in prompts])
    driver.run(preempt)
    assert driver.engine.stats().num_preemptions_total > 0
    assert driver.counts["chunks"] > 0
    assert driver.counts["most rows"] > 1
    model = reference(torch.float32)
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        # Each is the best after those before it, so all are the greedy ones.
        assert logprobs_of(model, prompt, tokens).argmax(-1).tolist() == tokens, index


def test_bfloat16_log_probabilities_are_near_transformers_own(
    family, make_driver, make_prompts, reference
):
    driver = make_driver(family, dtype="bfloat16", cpu_threads=1)
    prompt = make_prompts([64])[0]
    driver.add("0", prompt, GREEDY)
    driver.run()
    tokens = driver.tokens("0")
    ours = torch.tensor([pairs[0][1] for _, pairs in driver.trace("0")])
    theirs = logprobs_of(reference(torch.bfloat16), prompt, tokens)
    differences = (ours - theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs()
    # Logits of up to 8 have steps of 1/32 in bfloat16, and three layers of roundings lie below.
    assert differences.max() < 0.2
    assert differences.mean() < 0.05
