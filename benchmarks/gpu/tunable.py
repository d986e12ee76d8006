"""An entry of a table of launch configurations as it is measured, and what its makers share.

Knows no table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu.timing import Work
from gpu.tuning import Config, Entry
from octavo_kernels._launch import Architecture
from octavo_kernels._triton.ahead_of_time import KernelCase

FEW_ROWS, MANY_ROWS = 32, 4096
"""Rows of a decode step and of a prefill."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """An entry of a table, and how a configuration of it is measured."""

    entry: Entry
    works: Callable[[Config, torch.device], Sequence[Work]]
    """What is timed, each alone."""
    cases: Callable[[Config], Sequence[KernelCase]]
    """What may not spill."""


def pieces_entry(label: str, config: Config) -> Entry:
    """Return an entry of pieces that each warp has something of."""
    values = {"block_size": (256, 512, 1024, 2048, 4096, 8192, 16384), "num_warps": (2, 4, 8, 16)}
    return Entry(label, config, values, lambda x: bool(x.block_size >= 32 * x.num_warps))


def bind(function: Callable[..., object], *arguments: Any, **options: Any) -> Work:
    """Return the call of a function as work to be timed."""
    return lambda: function(*arguments, **options)


def cases_of(
    family: Any,
    architecture: Architecture,
    config: Config,
    changed: dict[str, int],
    dtype: str = "bf16",
    **where: int,
) -> list[KernelCase]:
    """Return the family's cases with these constants, launched as `config` says."""
    stages = {"num_stages": config.num_stages} if hasattr(config, "num_stages") else {}
    return [
        replace(case, constants={**case.constants, **changed}, num_warps=config.num_warps, **stages)
        for case in family.kernel_cases(architecture, dtype)
        if where.items() <= case.constants.items()
    ]
