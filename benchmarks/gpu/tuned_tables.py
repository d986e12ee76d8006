"""The tables of launch configurations: what each entry may become, and what it is measured on.

To add a table, write a function of the architecture that returns its `Tunable`s and name it in
TABLES. Knows how kernels are launched; tuning chooses. Those of logits are in tuned_logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from gpu.paged_batch import PagedStep, StepShape, make_step
from gpu.timing import Work
from gpu.tunable import FEW_ROWS, MANY_ROWS, Tunable, bind, cases_of, pieces_entry
from gpu.tuned_logits import bitmasks, penalties, row_scans, samplings
from gpu.tuning import Config, Entry
from octavo_kernels import _attention_launch, _launch, _linear_launch
from octavo_kernels._launch import Architecture
from octavo_kernels._triton import apply_rope, gated, linear, move_blocks, paged_attention, rms_norm
from octavo_kernels._triton import rope_and_write_kv_cache as fused_rope
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels.triton_attention import TritonAttention

_ATTENTION_VALUES = {
    "rows": (16, 32, 64, 128),
    "tile": (16, 32, 64, 128),
    "split": (256, 512, 1024),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 5),  # 4 runs ahead no further than 3
    "programs_per_processor": (1, 2, 3, 4),
}
_DTYPES = {2: (torch.bfloat16, "bf16"), 4: (torch.float32, "fp32")}


def norms(architecture: Architecture) -> list[Tunable]:
    """Return how rows are normalised, by their longest size."""
    values = {"block_rows": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8, 16)}

    def works(config: Config, device: torch.device) -> list[Work]:
        made = []
        for rows in (FEW_ROWS, MANY_ROWS):
            x, residual = torch.randn(2, rows, config.block_size, device=device).bfloat16()
            weight, out = torch.ones_like(x[0], dtype=torch.float32), torch.empty_like(x)
            tensors = (x, residual, weight, out, torch.empty_like(x))
            made.append(bind(rms_norm.launch_add_rms_norm, tensors, 1e-5, config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        constants = {"ROWS": config.block_rows, "SIZE": config.block_size}
        return cases_of(rms_norm, architecture, config, constants, SIZE=config.block_size)

    def fits(config: Config) -> bool:
        elements: int = config.block_rows * config.block_size
        return bool(32 * config.num_warps <= elements <= 2**15)

    return [
        Tunable(Entry(f"rows of {config.block_size}", config, values, fits), works, cases)
        for config in _launch.rms_norm_configs(architecture)
    ]


def rotations(architecture: Architecture) -> list[Tunable]:
    """Return how heads are turned, by their most angles, alone or while the cache is written."""
    values = {"block_heads": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)}

    def works(config: Config, device: torch.device) -> list[Work]:
        made, size = [], 2 * config.block_half
        for tokens in (FEW_ROWS, MANY_ROWS):
            q = torch.randn(tokens, 32, size, device=device).bfloat16()
            k, v = q[:, :8].contiguous(), q[:, 8:16].contiguous()
            layer = torch.zeros(2, tokens // 16, 8, 16, size, dtype=q.dtype, device=device)
            angles = torch.randn(tokens, size, device=device)
            at = torch.arange(tokens, device=device)
            alone, fused = apply_rope.launch_apply_rope, fused_rope.launch_rope_and_write_kv_cache
            made += [
                bind(alone, (q, k, q, k), at, angles, config, interleaved=False),
                bind(fused, (q, k, v, q), tuple(layer), at, angles, at, config, interleaved=False),
            ]
        return made

    def cases(config: Config) -> list[KernelCase]:
        heads, half = {"HEADS": config.block_heads}, config.block_half
        found = [
            cases_of(family, architecture, config, heads, HALF=half)
            for family in (apply_rope, fused_rope)
        ]
        return found[0] + found[1]

    return [
        Tunable(Entry(f"{config.block_half} angles", config, values), works, cases)
        for config in _launch.apply_rope_configs(architecture)
    ]


def activations(architecture: Architecture) -> list[Tunable]:
    """Return how gated activations are computed."""

    def works(config: Config, device: torch.device) -> list[Work]:
        made = []
        for tokens in (FEW_ROWS, MANY_ROWS):
            gate_up = torch.randn(tokens, 2 * 14336, device=device).bfloat16()
            out = torch.empty_like(gate_up[:, :14336])
            made.append(bind(gated.launch_gated, "silu_and_mul", gate_up, out, config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        return cases_of(gated, architecture, config, {"SIZE": config.block_size})

    entry = pieces_entry("all sizes", _launch.choose_gated(architecture))
    return [Tunable(entry, works, cases)]


def block_moves(architecture: Architecture) -> list[Tunable]:
    """Return how blocks are gathered and scattered."""

    def works(config: Config, device: torch.device) -> list[Work]:
        storage = torch.zeros(512, 2**18, dtype=torch.bfloat16, device=device)
        ids = torch.randperm(512, device=device)[:64]
        out = torch.empty_like(storage[:64])
        return [
            bind(move_blocks.launch_gather_blocks, storage, ids, out, config),
            bind(move_blocks.launch_scatter_blocks, out, ids, storage, config),
        ]

    def cases(config: Config) -> list[KernelCase]:
        return cases_of(move_blocks, architecture, config, {"SIZE": config.block_size})

    entry = pieces_entry("all sizes", _launch.choose_block_moves(architecture))
    return [Tunable(entry, works, cases)]


def attention(architecture: Architecture, element_bytes: int) -> list[Tunable]:
    """Return how attention runs, by its longest head; decode and prefill share the choice."""
    dtype, name = _DTYPES[element_bytes]

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
                bind(
                    step(index, device).attend,
                    TritonAttention(shape.cache_shape, device, config, processors),
                )
                for index, shape in enumerate(shapes)
            ]

        def cases(config: Config) -> list[KernelCase]:
            sizes = {"ROWS": config.rows, "TILE": config.tile, "SPLIT": config.split}
            found = cases_of(paged_attention, architecture, config, sizes, name, HEAD_DIM=head_dim)
            return [case for case in found if "TILE" in case.constants]

        entry = Entry(
            f"heads of {head_dim}",
            current,
            _ATTENTION_VALUES,
            lambda x: bool(x.split % x.tile == 0),
        )
        return Tunable(entry, works, cases)

    configs = _attention_launch.attention_configs(element_bytes, architecture)
    return [tunable(head_dim, config) for head_dim, config in configs.items()]


def linears(architecture: Architecture, element_bytes: int) -> list[Tunable]:
    """Return how row-independent products run; all numbers of rows share the choice.

    Of its tiles only the stages change, of all alike: other rows or warps would lead to another
    matrix instruction, and so to other bits.
    """
    dtype, name = _DTYPES[element_bytes]
    current = _linear_launch.choose_linear(element_bytes, architecture)
    values = {
        "columns": (64, 128, 256),
        "depth": (32, 64, 128),
        "tiles": tuple(
            tuple(replace(tile, num_stages=stages) for tile in current.tiles)
            for stages in (2, 3, 4, 5)
        ),
    }

    def works(config: Config, device: torch.device) -> list[Work]:
        weight = torch.randn(4096, 4096, device=device).to(dtype)
        made = []
        for rows in (1, FEW_ROWS, MANY_ROWS):
            x = torch.randn(rows, 4096, device=device).to(dtype)
            launch = linear.launch_linear
            made.append(bind(launch, x, weight, None, torch.empty_like(x), config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"COLUMNS": config.columns, "DEPTH": config.depth}
        stages = {tile.rows: tile.num_stages for tile in config.tiles}
        return [
            replace(
                case,
                constants={**case.constants, **sizes},
                num_stages=stages[case.constants["ROWS"]],
            )
            for case in linear.kernel_cases(architecture, name)
            if "ROWS" in case.constants
        ]

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
    "_sampling_launch._ROW_SCAN": row_scans,
    "_sampling_launch._SAMPLE": samplings,
    "_sampling_launch._PENALTIES": penalties,
    "_sampling_launch._BITMASK": bitmasks,
}
"""By module and name."""
