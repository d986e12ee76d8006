"""Measure what bfloat16, and weights of 8 bits, cost the demo model in accuracy.

    python -m benchmarks.quantization_accuracy [--windows 16] [--window-tokens 512]

Pieces of this repository's pages and source are scored: their tokens' log-probabilities, and the
most likely token in each place, are compared with those of the same engine in float32; so are
greedy answers to the pieces' beginnings. Prints a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.doc_tables import markdown_table
from benchmarks.script_options import COUNT

from octavo import LLM
from octavo.llm import Completion
from octavo.local.demo_model import demo_checkpoint
from octavo.model.quantization import quantization_refusal
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TEXTS = ("LICENSE", "docs/*.md", "backend/octavo/*.py")
EXACT = "float32"
FORMS: dict[str, dict[str, Any]] = {
    EXACT: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
PROMPT_TOKENS = 64
HEADS = (
    *("weights", "perplexity", "log-probability: mean error", "largest"),
    *("same most likely token", "tokens until an answer differs"),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one form of the model says of all windows."""

    logprobs: torch.Tensor
    """[tokens], of each token after those before it."""
    most_likely: torch.Tensor
    """[tokens], ids of the most likely ones there."""
    answers: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        """Return e to the mean of minus the log-probabilities."""
        return math.exp(-float(self.logprobs.mean()))


def is_served(options: dict[str, Any], device: torch.device) -> bool:
    """Say whether the device computes with weights of this form."""
    option, dtype = options.get("quantization"), getattr(torch, options["dtype"])
    return option is None or quantization_refusal(option, dtype, device) is None


def windows_of_text(num_windows: int, num_tokens: int) -> list[list[int]]:
    """Return token ids of windows that lie evenly over the text."""
    paths = [path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    ids = Tokenizer.load(str(demo_checkpoint())).encode(text)
    gap = (len(ids) - num_tokens) // num_windows
    return [ids[index * gap : index * gap + num_tokens] for index in range(num_windows)]


def score(windows: list[list[int]], num_tokens: int, options: dict[str, Any]) -> Scores:
    """Score windows by a model loaded with these options, and answer their beginnings."""
    llm = LLM("demo", num_kv_blocks=2048, **options)
    read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored = [pairs for each in llm.generate(windows, read) for pairs in _scores_of(each)]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    answers = llm.generate([window[:PROMPT_TOKENS] for window in windows], greedy)
    own, ids = zip(*scored, strict=True)
    return Scores(
        torch.tensor(own).double(), torch.tensor(ids), tuple(a.token_ids for a in answers)
    )


def _scores_of(completion: Completion) -> list[tuple[float, int]]:
    """Return each token's log-probability, and the id of the most likely one in its place."""
    assert completion.prompt_logprobs is not None
    found = [each for each in completion.prompt_logprobs if each is not None]
    return [(each[0].logprob, min(each, key=lambda x: x.rank).token_id) for each in found]


def shared_tokens(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Return how many tokens two answers begin with alike."""
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    return same.index(False) if False in same else len(same)


def row_of(name: str, scores: Scores, exact: Scores) -> list[str]:
    errors = (scores.logprobs - exact.logprobs).abs()
    same = (scores.most_likely == exact.most_likely).double().mean()
    shared = [shared_tokens(*pair) for pair in zip(scores.answers, exact.answers, strict=True)]
    return [
        name,
        f"{scores.perplexity:.3f}",
        f"{float(errors.mean()):.4f}",
        f"{float(errors.max()):.2f}",
        f"{float(same):.1%}",
        f"{sum(shared) / len(shared):.1f}",
    ]


@click.command()
@click.option("--windows", default=16, show_default=True, type=COUNT, help="Pieces of text.")
@click.option(
    "--window-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens in each.",
)
@click.option(
    "--answer-tokens",
    default=32,
    show_default=True,
    type=COUNT,
    help="Tokens of each answer.",
)
def main(windows: int, window_tokens: int, answer_tokens: int) -> None:
    """Print perplexities, and differences from float32."""
    texts = windows_of_text(windows, window_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = {
        name: score(texts, answer_tokens, options)
        for name, options in FORMS.items()
        if is_served(options, device)
    }
    num_tokens = len(scores[EXACT].logprobs)
    click.echo(f"{num_tokens:,} tokens in {windows} windows, answers of {answer_tokens} tokens\n")
    rows = [row_of(name, each, scores[EXACT]) for name, each in scores.items()]
    click.echo(markdown_table(HEADS, rows), nl=False)


if __name__ == "__main__":
    main()
