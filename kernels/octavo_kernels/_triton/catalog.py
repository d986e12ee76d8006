"""Every kernel with every type and launch configuration that the tables give, and its table.

To add a kernel, write its `kernel_cases(capability, dtype)` and name its module in _FAMILIES.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import triton

from octavo_kernels._launch import COMPILED_ARCHITECTURES, Architecture
from octavo_kernels._triton import (
    apply_penalties,
    apply_rope,
    apply_token_bitmask,
    gated,
    greedy,
    grouped_linear,
    layer_norm,
    linear,
    move_blocks,
    paged_attention,
    rms_norm,
    rope_and_write_kv_cache,
    sample,
    token_logprobs,
    weighted_sum,
    write_kv_cache,
)
from octavo_kernels._triton.ahead_of_time import KernelCase, Resources, compile_case

_FAMILIES = (
    rms_norm,
    layer_norm,
    apply_rope,
    gated,
    write_kv_cache,
    rope_and_write_kv_cache,
    move_blocks,
    linear,
    grouped_linear,
    weighted_sum,
    paged_attention,
    greedy,
    sample,
    token_logprobs,
    apply_penalties,
    apply_token_bitmask,
)
_DTYPES = ("fp32", "bf16", "fp16")

Usage = dict[str, dict[Architecture, Resources]]
"""What each case uses, by its name, then by architecture."""


def kernel_cases(architecture: Architecture) -> list[KernelCase]:
    """Return all that may be launched on this architecture."""
    return [
        case
        for family, dtype in product(_FAMILIES, _DTYPES)
        for case in family.kernel_cases(architecture, dtype)
    ]


def compile_catalog() -> Usage:
    """Compile every case for every architecture, on all processors; takes up to minutes.

    What was compiled before is found in the language's own cache.
    """
    jobs = [
        (architecture, index, case.name)
        for architecture in COMPILED_ARCHITECTURES
        for index, case in enumerate(kernel_cases(architecture))
    ]
    workers = len(os.sched_getaffinity(0))
    usage: Usage = {}
    # Spawned, for a fork of a process that runs threads may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for (architecture, _, name), used in zip(
            jobs, pool.map(_compile, jobs, chunksize=4), strict=True
        ):
            usage.setdefault(name, {})[architecture] = used
    return usage


def _compile(job: tuple[Architecture, int, str]) -> Resources:
    architecture, index, _ = job
    return compile_case(kernel_cases(architecture)[index], architecture)


def usage_table(usage: Usage) -> str:
    """Return the committed table, in Markdown."""
    heads = " | ".join(map(_name, COMPILED_ARCHITECTURES))
    lines = [
        "# What the GPU kernels use",
        "",
        "Made by `scripts/kernel-table`, which compiles every kernel with every type and launch",
        f"configuration with Triton {triton.__version__}; it needs no GPU. A cell: registers of a",
        "thread / bytes of stack of a thread, to which registers spill / bytes of shared memory of",
        "a program. For gfx942 the kernels are compiled only; nothing launches attention there.",
        "",
        f"| kernel | {heads} |",
        "|---|" + "---|" * len(COMPILED_ARCHITECTURES),
    ]
    for name, used in usage.items():
        cells = [_cell(used.get(architecture)) for architecture in COMPILED_ARCHITECTURES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _name(architecture: Architecture) -> str:
    return architecture if isinstance(architecture, str) else f"sm_{architecture}"


def _cell(used: Resources | None) -> str:
    if used is None:
        return "-"
    return f"{used.registers} / {used.stack_bytes} / {used.shared_bytes}"
