"""In bfloat16, log-probabilities stay close to float32's, and tokens differ only where it is close.

Even transformers in bfloat16 does not follow its own float32 greedy output, so the tokens cannot be
compared: instead each of our tokens is scored by transformers in float32 after the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.sampling_params import SamplingParams

# A logit of size 16 to 32 has a step of 1/8 in bfloat16, and 30 layers of rounding lie below it.
LARGEST_LOGPROB_ERROR = 0.35
MEAN_LOGPROB_ERROR = 0.05
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "It was the best of times, it was the worst of times, " * 6,
]


@dataclass(frozen=True)
class Divergence:
    """Where a greedy answer first leaves float32's, and by how much float32 preferred its own."""

    index: int
    ours: int
    theirs: int
    margin: float


def first_divergence(logprobs: torch.Tensor, tokens: list[int]) -> Divergence | None:
    """Compare tokens with the arg-max of float32 log-probabilities after the same tokens."""
    for index, token in enumerate(tokens):
        best = int(logprobs[index].argmax())
        if best != token:
            margin = float(logprobs[index, best] - logprobs[index, token])
            return Divergence(index, token, best, margin)
    return None


@pytest.fixture(scope="module")
def scored(checkpoints, request):
    """(prompt, our tokens, our log-probabilities, float32's [tokens, vocab]) of each prompt."""
    from octavo import LLM

    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
    llm = LLM(str(checkpoints["demo"]), dtype="bfloat16", max_model_len=512, num_kv_blocks=128)
    answers = llm.generate(PROMPTS, params)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["demo"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["demo"])
    rows = []
    for text, answer in zip(PROMPTS, answers, strict=True):
        prompt = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(answer.token_ids)])).logits[0]
        theirs = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        rows.append(
            (
                text,
                list(answer.token_ids),
                torch.tensor([own.logprob for own, *_ in answer.logprobs]),
                theirs,
            )
        )
    return rows


def test_bfloat16_log_probabilities_stay_within_the_stated_bound(scored):
    errors = []
    for _, tokens, ours, theirs in scored:
        errors.append((ours - theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs())
    joined = torch.cat(errors)
    assert len(joined) == 48 * len(PROMPTS)
    assert float(joined.max()) <= LARGEST_LOGPROB_ERROR
    assert float(joined.mean()) <= MEAN_LOGPROB_ERROR


def test_bfloat16_tokens_differ_first_only_where_float32_is_nearly_undecided(scored):
    for text, tokens, _, theirs in scored:
        divergence = first_divergence(theirs, tokens)
        if divergence is not None:
            print(f"{text[:40]!r} differs first at {divergence}")
            assert divergence.margin <= 2 * LARGEST_LOGPROB_ERROR, (text, divergence)


def test_a_wrong_token_is_found_where_it_stands(scored):
    _, tokens, _, theirs = scored[0]
    wrong = int(theirs[5].argmin())
    divergence = first_divergence(theirs, [*theirs[:5].argmax(dim=-1).tolist(), wrong, *tokens[6:]])
    assert divergence is not None
    assert (divergence.index, divergence.ours) == (5, wrong)
    assert divergence.margin > 2 * LARGEST_LOGPROB_ERROR
