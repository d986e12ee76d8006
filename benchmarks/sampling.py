"""Time the choice of a step's tokens: what rows of different wishes cost, beside plain torch.

    python benchmarks/sampling.py [--rows 64] [--vocab 49152] [--repeats 31]

Prints milliseconds a step, medians of all cases in turns. Logits are random with a head as a
model's: some tens of tokens hold most of the weight; `flat` has no head. Beside stands what the
sampler did in torch before it had kernels: an arg-max, or a partial sort of 256 tokens, and a whole
one for rows that keep more. A row is drawn by one thread, so rows go to as many as torch has.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import click
import torch
from quiet import QuietWatch
from script_options import COUNT

from octavo_kernels import (
    Penalties,
    SamplingRows,
    apply_penalties,
    apply_token_bitmask,
    greedy,
    sample,
    token_logprobs,
)
from octavo_kernels.sample import uniform_reference

ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
NUM_SEEN = 1000
"""Tokens that a row's penalties list."""
PREFILTER = 256

Call = Callable[[], object]


def make_logits(rows: int, vocab: int, num_best: int) -> torch.Tensor:
    """Return [rows, vocab] float32 whose best `num_best` stand out."""
    logits = 2.0 * torch.randn(rows, vocab)
    best = torch.randint(vocab, (rows, num_best))
    return logits.scatter_add_(1, best, 4 + 2 * torch.randn(rows, num_best))


def make_rows(count: int, **values: float) -> SamplingRows:
    each = {**ALL, **values}
    return SamplingRows(
        torch.full((count,), each["temperature"]),
        torch.full((count,), int(each["top_k"]), dtype=torch.int32),
        torch.full((count,), each["top_p"]),
        torch.full((count,), each["min_p"]),
        torch.arange(count),
        torch.arange(count),
    )


def make_penalties(rows: int, vocab: int) -> Penalties:
    seen = torch.stack([torch.randperm(vocab)[:NUM_SEEN] for _ in range(rows)])
    return Penalties(
        torch.arange(rows),
        NUM_SEEN * torch.arange(rows + 1),
        seen.flatten(),
        torch.ones(rows * NUM_SEEN, dtype=torch.int32),
        *(torch.full((rows,), value) for value in (1.1, 0.5, 0.5)),
    )


def sample_in_torch(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Draw by a partial sort, and again by a whole one where that cut too much off."""
    probs = (logits / rows.temperature[:, None]).softmax(-1)
    number = uniform_reference(rows.seeds, rows.positions).float()
    if not ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any():
        return pick(probs, number)
    best, ids = probs.topk(PREFILTER)
    weights, fits = filter_sorted(best, rows)
    drawn = ids.gather(1, pick(weights, number)[:, None])[:, 0]
    rest = (~fits).nonzero()[:, 0]
    if len(rest):
        best, ids = probs[rest].sort(-1, descending=True)
        fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
        weights, _ = filter_sorted(best, SamplingRows(*(field[rest] for field in fields)))
        drawn[rest] = ids.gather(1, pick(weights, number[rest])[:, None])[:, 0]
    return drawn


def filter_sorted(best: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that are kept of the best, and whether no other is kept."""
    top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]
    floor = torch.where(
        top_k > 0, best.gather(1, (top_k.long() - 1).clamp(0, best.shape[1] - 1)), -1.0
    )
    inside = best * (best >= floor)
    mass = inside.cumsum(-1)
    total = torch.where(top_k > 0, mass[:, -1:], 1.0)
    kept = ((mass - inside < top_p * total) | (top_p >= 1)) & (inside >= min_p * inside[:, :1])
    cut = (best[:, -1:] < floor) | (mass[:, -1:] >= top_p) | (best[:, -1:] < min_p * best[:, :1])
    return inside * kept, cut[:, 0]


def pick(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    mass = weights.cumsum(-1)
    index = torch.searchsorted(mass, number[:, None] * mass[:, -1:], right=True)[:, 0]
    return index.clamp(max=weights.shape[1] - 1)


def penalize_and_sample(
    logits: torch.Tensor, penalties: Penalties, rows: SamplingRows
) -> torch.Tensor:
    return sample(apply_penalties(logits, penalties, out=logits), rows)


def mask_and_choose(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(logits))
    return greedy(apply_token_bitmask(logits, bitmask, rows, out=logits))


def make_cases(rows: int, vocab: int) -> dict[str, tuple[Call, Call | None]]:
    """Return what is timed by name: by kernels, and in torch."""
    logits, flat = make_logits(rows, vocab, 60), make_logits(rows, vocab, 0)
    cases: dict[str, tuple[Call, Call | None]] = {
        "greedy": (partial(greedy, logits), partial(logits.argmax, -1))
    }
    for name, source, values in (
        ("random", logits, {}),
        ("top-k, top-p, min-p", logits, FILTERED),
        ("top-p", logits, {"top_p": 0.9}),
        ("top-p, flat", flat, {"top_p": 0.9}),
    ):
        wishes = make_rows(rows, **values)
        cases[name] = (partial(sample, source, wishes), partial(sample_in_torch, source, wishes))
    penalized, masked, filtered = logits.clone(), logits.clone(), make_rows(rows, **FILTERED)
    penalties = make_penalties(rows, vocab)
    cases["top-k, top-p, min-p, penalties"] = (
        partial(penalize_and_sample, penalized, penalties, filtered),
        None,
    )
    bitmask = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32))).int()
    cases["bitmask, greedy"] = (partial(mask_and_choose, masked, bitmask), None)
    each, ids = torch.arange(rows), torch.arange(rows)
    cases["log-probabilities"] = (
        partial(token_logprobs, logits, each, ids),
        lambda: logits.log_softmax(-1).gather(1, ids[:, None]),
    )
    return cases


def measure(call: Call) -> float:
    """Return milliseconds."""
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e3


@click.command()
@click.option("--rows", default=64, show_default=True, type=COUNT)
@click.option("--vocab", default=49_152, show_default=True, type=click.IntRange(min=NUM_SEEN))
@click.option("--repeats", default=31, show_default=True, type=COUNT)
def main(rows: int, vocab: int, repeats: int) -> None:
    """Time the choice of a step's tokens."""
    torch.manual_seed(0)
    cases = make_cases(rows, vocab)
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    with QuietWatch() as watch:
        for _ in range(repeats):
            for name, pair in cases.items():
                for side, call in enumerate(pair):
                    if call is not None:
                        times[name, side].append(measure(call))
    noise = "" if watch.is_valid else f"   NO CLAIM: others {watch.foreign_share:.0%} of CPU"
    click.echo(f"{f'{rows} x {vocab}, ms':32}{'kernels':>9}{'torch':>9}{'ratio':>8}{noise}")
    for name, pair in cases.items():
        ours = statistics.median(times[name, 0])
        line = f"{name:32}{ours:9.2f}"
        if pair[1] is not None:
            theirs = statistics.median(times[name, 1])
            line += f"{theirs:9.2f}{theirs / ours:8.1f}"
        click.echo(line)


if __name__ == "__main__":
    main()
