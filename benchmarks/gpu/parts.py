"""The parts of the check: what each is called, what it may take, and where it begins.

A part's module is imported when the part runs, for each needs other packages, and one that is
missing fails its own part alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu.context import Context
from gpu.report import Section

Run = Callable[[Context], list[Section]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check, run in a process of its own."""

    functions: tuple[str, ...]
    """Its sections come from these, as "module:function"."""
    budget_s: float
    """What it may take on a GPU."""
    what: str


PARTS = {
    "kernels": Part(("correctness:kernels",), 140, "every operation against its reference"),
    "determinism": Part(
        ("kernel_determinism:kernel_determinism", "engine_determinism:engine_determinism"),
        120,
        "the same bits, of kernels and of engines, however they work",
    ),
    "equality": Part(("equality:equality",), 75, "answers as transformers computes them"),
    "serving": Part(("serving:serving",), 40, "no compilation and no wait after load"),
    "attention": Part(("attention_speed:attention",), 60, "decode and prefill attention"),
    "steps": Part(("decode_speed:steps",), 100, "whole decode steps against the floor"),
    "products": Part(("product_speed:products",), 30, "products with weights against torch's"),
    "ranks": Part(
        ("rank_answers:rank_answers", "rank_sums:rank_sums", "rank_speed:rank_speed"),
        600,
        "one model on several GPUs, where there are several",
    ),
    "swap": Part(("swap_speed:swap",), 20, "KV blocks to the host and back"),
}


def run_part(name: str, context: Context) -> Iterator[Section]:
    """Run one part in this process, and yield its sections as they are done."""
    for place in PARTS[name].functions:
        module, function = place.split(":")
        run: Run = getattr(importlib.import_module(f"gpu.{module}"), function)
        yield from run(context)
