"""Time a mixture of experts by grouped products against a loop over the experts.

    python benchmarks/experts.py [--runs 40] [--experts 64] [--chosen 8] [--hidden 2048]
                                 [--inner 1024] [--threads 1]

The default sizes are those of a layer of OLMoE-1B-7B, in bfloat16; each token goes to random
experts. Prints milliseconds of a layer without its router, best and median of the runs, and how
many times as long as the grouped products the loop takes. Both take turns in one run, so that on a
busy machine the ratio still tells something, and have the same weights, packed, and the same bits.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from octavo.model.experts import Groups, group_by_expert
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo_kernels import silu_and_mul

ROWS = (1, 32, 256)
CPU = torch.device("cpu")
Compute = Callable[[torch.Tensor, Groups], torch.Tensor]
"""Makes a row of each token and expert of it, sorted by expert."""


def make_both(options: argparse.Namespace) -> dict[str, Compute]:
    """Return both ways to compute, with the same random weights."""
    shapes = (2 * options.inner, options.hidden), (options.hidden, options.inner)
    count, dtype = options.experts, torch.bfloat16
    gate_up, down = (
        GroupedLinear((count, *shape), dtype, CPU, is_gated=is_gated)
        for shape, is_gated in zip(shapes, (True, False), strict=True)
    )
    single: list[tuple[PackedLinear, PackedLinear]] = []
    for index in range(count):
        first, second = (torch.randn(shape).to(dtype) / shape[1] ** 0.5 for shape in shapes)
        gate_up.fill(index, first)
        down.fill(index, second)
        single.append((PackedLinear(first, is_gated=True), PackedLinear(second)))

    def grouped(x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return down(gate_up.silu(x[groups.tokens], groups.starts), groups.starts)

    def loop(x: torch.Tensor, groups: Groups) -> torch.Tensor:
        rows = x[groups.tokens]
        out = torch.empty_like(rows)
        bounds = groups.starts.tolist()
        for (own_gate_up, own_down), first, end in zip(single, bounds, bounds[1:], strict=False):
            if first < end:
                active = silu_and_mul(own_gate_up(rows[first:end]))
                own_down(active, out=out[first:end])
        return out

    return {"grouped": grouped, "loop": loop}


def measure(both: dict[str, Compute], rows: int, options: argparse.Namespace) -> dict[str, list]:
    """Return the milliseconds of each way's runs, which take turns over the same steps."""
    times: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(options.runs):
        x = torch.randn(rows, options.hidden).bfloat16()
        chosen = torch.rand(rows, options.experts).argsort(dim=1)[:, : options.chosen]
        groups, results = group_by_expert(chosen, options.experts), []
        for name, compute in both.items():
            start = time.perf_counter()
            results.append(compute(x, groups))
            times[name].append((time.perf_counter() - start) * 1e3)
        assert torch.equal(*results), "the two ways differ"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        *(("runs", 40), ("experts", 64), ("chosen", 8), ("hidden", 2048), ("inner", 1024)),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    both = make_both(options)
    print(f"{'rows':>5} {'way':10} {'best ms':>9} {'median ms':>10} {'times':>6}")
    for rows in ROWS:
        times = measure(both, rows, options)
        ratio = statistics.median(
            loop / grouped for loop, grouped in zip(times["loop"], times["grouped"], strict=True)
        )
        for name, own in times.items():
            shown = f"{ratio:6.2f}" if name == "loop" else ""
            print(f"{rows:5} {name:10} {min(own):9.2f} {statistics.median(own):10.2f} {shown}")


if __name__ == "__main__":
    main()
