"""The part `equality`: greedy answers are what transformers computes for the same checkpoint.

Tokens are not compared one by one: where two logits are almost equal, rounding decides, and all
that follows differs. Instead transformers is given our answers, so that each position has the same
past, and says how each of our tokens fares there. In float32 a token must be the best but for
rounding. In bfloat16 the judge is float32 on the same weights, and our error may be little more
than transformers' own in bfloat16.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.context import Context
from gpu.engines import Ask, Trace, answer, draw_asks, make_engine, options_of, release
from gpu.models import LLAMA_1B, TINY, ModelSize, save_checkpoint
from gpu.report import Line, Section, Verdict
from octavo.config import EngineConfig

_FLOAT32_TOLERANCE = 2e-3  # of logits about 1 to 5 in size, after sums of thousands of products
_BFLOAT16_MEAN, _BFLOAT16_WORST = 1.25, 2.0  # times transformers' own error


@dataclass(frozen=True, slots=True)
class Judged:
    """How our tokens fare under one model, over all positions; errors are of log-probabilities."""

    num_tokens: int
    num_best: int
    """Our token is the one of the largest logit."""
    worst_gap: float
    """Most that a token of ours lies below the best."""
    logprobs: torch.Tensor
    """[num_tokens] float64, of our tokens."""


def equality(context: Context) -> list[Section]:
    """Answer greedily in float32 and bfloat16, and have transformers judge."""
    size = LLAMA_1B if context.is_gpu else TINY
    lengths = (1, 5, 17, 64, 129, 300, 511, 700) if context.is_gpu else (1, 17, 40)
    asks = draw_asks(lengths, 32 if context.is_gpu else 8, size.vocab_size, greedy=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        save_checkpoint(size, checkpoint, context.device)
        release(context.device)
        answers = {
            dtype: _answer(checkpoint, dtype, asks, context) for dtype in ("float32", "bfloat16")
        }
        exact = {
            dtype: _judge(checkpoint, torch.float32, asks, traces, context)
            for dtype, traces in answers.items()
        }
        own = _judge(checkpoint, torch.bfloat16, asks, answers["bfloat16"], context)
    lines = (
        _float32_line(exact["float32"], answers["float32"]),
        _bfloat16_line(exact["bfloat16"], own, answers["bfloat16"]),
    )
    heads = (
        "type",
        "tokens",
        "transformers' best",
        "largest gap to it",
        "error of log-probability",
    )
    return [Section(f"Equality with transformers, {_describe(size)}", heads, lines)]


def _describe(size: ModelSize) -> str:
    layers, hidden = size.num_hidden_layers, size.hidden_size
    return f"a random Llama of {layers} layers of {hidden}"


def _answer(checkpoint: Path, dtype: str, asks: list[Ask], context: Context) -> list[Trace]:
    longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks)
    options = {
        "model": str(checkpoint),
        "dtype": dtype,
        "max_model_len": longest,
        "num_kv_blocks": len(asks) * -(-longest // 16) + 1,
    }
    engine = make_engine(EngineConfig(**options_of(context.device, **options)))
    traces = answer(engine, asks)
    del engine
    release(context.device)
    return traces


@torch.inference_mode()
def _judge(
    checkpoint: Path, dtype: torch.dtype, asks: list[Ask], traces: list[Trace], context: Context
) -> Judged:
    """Let transformers compute the logits of every position of every answer."""
    from transformers import AutoModelForCausalLM

    # Plain products: other attention may round float32 to fewer bits.
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="eager"
    )
    model = model.to(context.device).eval()
    best, gaps, logprobs = [], [], []
    for ask, trace in zip(asks, traces, strict=True):
        answered = [token for token, _ in trace]
        ids = torch.tensor([[*ask.prompt, *answered]], device=context.device)
        logits = model(ids).logits[0, len(ask.prompt) - 1 : -1].double()
        ours = logits.gather(1, torch.tensor(answered, device=context.device)[:, None])[:, 0]
        gaps.append((logits.amax(-1) - ours).cpu())
        best.append(gaps[-1] == 0)
        logprobs.append((ours - logits.logsumexp(-1)).cpu())
    del model
    release(context.device)
    gap = torch.cat(gaps)
    return Judged(len(gap), int(torch.cat(best).sum()), float(gap.max()), torch.cat(logprobs))


def _errors(judged: Judged, traces: list[Trace]) -> torch.Tensor:
    ours = torch.tensor([logprob for trace in traces for _, logprob in trace], dtype=torch.float64)
    return (ours - judged.logprobs).abs()


def _float32_line(judged: Judged, traces: list[Trace]) -> Line:
    worst = float(_errors(judged, traces).max())
    holds = max(worst, judged.worst_gap) <= _FLOAT32_TOLERANCE
    error = f"{worst:.1e} at most (allowed {_FLOAT32_TOLERANCE:.0e})"
    return Line(("float32", *_counts(judged), error), Verdict.of(holds))


def _bfloat16_line(judged: Judged, own: Judged, traces: list[Trace]) -> Line:
    """Compare our distance from float32 with that of transformers in bfloat16."""
    ours, theirs = _errors(judged, traces), (own.logprobs - judged.logprobs).abs()
    mean = float(ours.mean() / theirs.mean())
    worst = float(ours.max() / theirs.max())
    # A token that is not float32's best must lie within what rounding moves two logits.
    holds = mean <= _BFLOAT16_MEAN and worst <= _BFLOAT16_WORST
    holds &= judged.worst_gap <= 2 * _BFLOAT16_WORST * float(theirs.max())
    error = f"{mean:.2f} of transformers' own on average, {worst:.2f} at most"
    return Line(("bfloat16", *_counts(judged), error), Verdict.of(holds))


def _counts(judged: Judged) -> tuple[str, str, str]:
    return str(judged.num_tokens), str(judged.num_best), f"{judged.worst_gap:.1e}"
