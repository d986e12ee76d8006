"""The tables of launch configurations: what each entry may become, and what it is measured on.

To add a table, write a function of the architecture that returns its `Tunable`s and name it in
TABLES. Knows how kernels are launched; tuning chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from gpu.paged_batch import PagedStep, StepShape, make_step
from gpu.timing import Work
from gpu.tuning import Config, Entry
from octavo_kernels import _attention_launch, _launch, _linear_launch
from octavo_kernels._launch import Architecture
from octavo_kernels._triton import apply_rope, gated, linear, move_blocks, paged_attention, rms_norm
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels.triton_attention import TritonAttention

_DTYPES = {2: (torch.bfloat16, "bf16"), 4: (torch.float32, "fp32")}
_FEW, _MANY = 32, 4096  # rows of a decode step and of a prefill


@dataclass(frozen=True, slots=True)
class Tunable:
    """An entry of a table, and how a configuration of it is measured."""

    entry: Entry
    works: Callable[[Config, torch.device], Sequence[Work]]
    """What is timed, each alone."""
    cases: Callable[[Config], Sequence[KernelCase]]
    """What may not spill."""


def norms(architecture: Architecture) -> list[Tunable]:
    """Return how rows are normalised, by their longest size."""
    values = {"block_rows": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8, 16)}

    def works(config: Config, device: torch.device) -> list[Work]:
        made = []
        for rows in (_FEW, _MANY):
            x, residual = torch.randn(2, rows, config.block_size, device=device).bfloat16()
            weight, out = torch.ones_like(x[0]), torch.empty_like(x)
            tensors = (x, residual, weight, out, torch.empty_like(x))
            made.append(_bind(rms_norm.launch_add_rms_norm, tensors, 1e-5, config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        constants = {"ROWS": config.block_rows, "SIZE": config.block_size}
        return _cases(rms_norm, architecture, config, constants, SIZE=config.block_size)

    def fits(config: Config) -> bool:
        elements: int = config.block_rows * config.block_size
        return bool(32 * config.num_warps <= elements <= 2**15)

    return [
        Tunable(Entry(f"rows of {config.block_size}", config, values, fits), works, cases)
        for config in _launch.rms_norm_configs(architecture)
    ]


def rotations(architecture: Architecture) -> list[Tunable]:
    """Return how heads are turned, by their most angles."""
    values = {"block_heads": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)}

    def works(config: Config, device: torch.device) -> list[Work]:
        made = []
        for tokens in (_FEW, _MANY):
            q = torch.randn(tokens, 32, 2 * config.block_half, device=device).bfloat16()
            k = q[:, :8].contiguous()
            angles = torch.randn(tokens, 2 * config.block_half, device=device)
            tensors, positions = (q, k, q, k), torch.arange(tokens, device=device)
            launch = apply_rope.launch_apply_rope
            made.append(_bind(launch, tensors, positions, angles, config, interleaved=False))
        return made

    def cases(config: Config) -> list[KernelCase]:
        constants = {"HEADS": config.block_heads}
        return _cases(apply_rope, architecture, config, constants, HALF=config.block_half)

    return [
        Tunable(Entry(f"{config.block_half} angles", config, values), works, cases)
        for config in _launch.apply_rope_configs(architecture)
    ]


def activations(architecture: Architecture) -> list[Tunable]:
    """Return how gated activations are computed."""

    def works(config: Config, device: torch.device) -> list[Work]:
        made = []
        for tokens in (_FEW, _MANY):
            gate_up = torch.randn(tokens, 2 * 14336, device=device).bfloat16()
            out = torch.empty_like(gate_up[:, :14336])
            made.append(_bind(gated.launch_gated, "silu_and_mul", gate_up, out, config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        return _cases(gated, architecture, config, {"SIZE": config.block_size})

    entry = _pieces("all sizes", _launch.choose_gated(architecture))
    return [Tunable(entry, works, cases)]


def block_moves(architecture: Architecture) -> list[Tunable]:
    """Return how blocks are gathered and scattered."""

    def works(config: Config, device: torch.device) -> list[Work]:
        storage = torch.zeros(512, 2**18, dtype=torch.bfloat16, device=device)
        ids = torch.randperm(512, device=device)[:64]
        out = torch.empty_like(storage[:64])
        return [
            _bind(move_blocks.launch_gather_blocks, storage, ids, out, config),
            _bind(move_blocks.launch_scatter_blocks, out, ids, storage, config),
        ]

    def cases(config: Config) -> list[KernelCase]:
        return _cases(move_blocks, architecture, config, {"SIZE": config.block_size})

    entry = _pieces("all sizes", _launch.choose_block_moves(architecture))
    return [Tunable(entry, works, cases)]


def attention(architecture: Architecture, element_bytes: int) -> list[Tunable]:
    """Return how attention runs, by its longest head; decode and prefill share the choice."""
    dtype, name = _DTYPES[element_bytes]
    values = {
        "rows": (16, 32, 64, 128),
        "tile": (16, 32, 64, 128),
        "split": (256, 512, 1024),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 5),  # 4 runs ahead no further than 3
        "programs_per_processor": (1, 2, 3, 4),
    }

    def tunable(head_dim: int, current: Config) -> Tunable:
        shapes = [
            StepShape(num_seqs=32, context=4096, head_dim=head_dim, dtype=dtype),
            StepShape(num_seqs=1, context=2048, rows=2048, head_dim=head_dim, dtype=dtype),
        ]

        @cache
        def step(index: int, device: torch.device) -> PagedStep:
            return make_step(shapes[index], device)

        def works(config: Config, device: torch.device) -> list[Work]:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            return [
                _bind(
                    step(index, device).attend,
                    TritonAttention(shape.cache_shape, device, config, processors),
                )
                for index, shape in enumerate(shapes)
            ]

        def cases(config: Config) -> list[KernelCase]:
            sizes = {"ROWS": config.rows, "TILE": config.tile, "SPLIT": config.split}
            found = _cases(paged_attention, architecture, config, sizes, name, HEAD_DIM=head_dim)
            return [case for case in found if "TILE" in case.constants]

        entry = Entry(f"heads of {head_dim}", current, values, lambda x: x.split % x.tile == 0)
        return Tunable(entry, works, cases)

    configs = _attention_launch.attention_configs(element_bytes, architecture)
    return [tunable(head_dim, config) for head_dim, config in configs.items()]


def linears(architecture: Architecture, element_bytes: int) -> list[Tunable]:
    """Return how row-independent products run; all numbers of rows share the choice.

    Its tiles stay as they are: another would lead to another matrix instruction, and so to other
    bits.
    """
    dtype, name = _DTYPES[element_bytes]
    values = {"columns": (64, 128, 256), "depth": (32, 64, 128)}

    def works(config: Config, device: torch.device) -> list[Work]:
        weight = torch.randn(4096, 4096, device=device).to(dtype)
        made = []
        for rows in (1, _FEW, _MANY):
            x = torch.randn(rows, 4096, device=device).to(dtype)
            launch = linear.launch_linear
            made.append(_bind(launch, x, weight, None, torch.empty_like(x), config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"COLUMNS": config.columns, "DEPTH": config.depth}
        found = [
            case for case in linear.kernel_cases(architecture, name) if "DEPTH" in case.constants
        ]
        return [replace(case, constants={**case.constants, **sizes}) for case in found]

    current = _linear_launch.choose_linear(element_bytes, architecture)
    return [Tunable(Entry("all sizes", current, values), works, cases)]


TABLES: dict[str, Callable[[Architecture], list[Tunable]]] = {
    "_launch._RMS_NORM": norms,
    "_launch._APPLY_ROPE": rotations,
    "_launch._GATED": activations,
    "_launch._BLOCK_MOVES": block_moves,
    "_attention_launch._HALF": lambda architecture: attention(architecture, 2),
    "_attention_launch._SINGLE": lambda architecture: attention(architecture, 4),
    "_linear_launch._HALF": lambda architecture: linears(architecture, 2),
    "_linear_launch._SINGLE": lambda architecture: linears(architecture, 4),
}
"""By module and name."""


def _pieces(label: str, config: Config) -> Entry:
    values = {"block_size": (512, 1024, 2048, 4096, 8192, 16384), "num_warps": (2, 4, 8, 16)}
    return Entry(label, config, values, lambda x: x.block_size >= 32 * x.num_warps)


def _bind(function: Callable[..., object], *arguments: Any, **options: Any) -> Work:
    return lambda: function(*arguments, **options)


def _cases(
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
