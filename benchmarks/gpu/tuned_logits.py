"""The tables of launches on logits; see tuned_tables."""

from __future__ import annotations

import torch

from gpu.timing import Work
from gpu.tunable import FEW_ROWS, Tunable, bind, cases_of, pieces_entry
from gpu.tuning import Config, Entry
from octavo_kernels import Penalties, SamplingRows, _sampling_launch
from octavo_kernels._launch import Architecture
from octavo_kernels._triton import (
    apply_penalties,
    apply_token_bitmask,
    greedy,
    sample,
    token_logprobs,
)
from octavo_kernels._triton.ahead_of_time import KernelCase

_VOCAB = 128_256


def row_scans(architecture: Architecture) -> list[Tunable]:
    """Return how a row is read by one program, for its best token or a token's probability."""

    def works(config: Config, device: torch.device) -> list[Work]:
        logits, ids = _logits(device), torch.arange(FEW_ROWS, device=device)
        logprobs = torch.empty(FEW_ROWS, device=device)
        launch = token_logprobs.launch_token_logprobs
        return [
            bind(greedy.launch_greedy, logits, torch.empty_like(ids), config),
            bind(launch, logits, ids, ids, logprobs, config),
        ]

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"SIZE": config.block_size}
        found = [cases_of(x, architecture, config, sizes, "fp32") for x in (greedy, token_logprobs)]
        return found[0] + found[1]

    entry = pieces_entry("all sizes", _sampling_launch.choose_row_scan(architecture))
    return [Tunable(entry, works, cases)]


def samplings(architecture: Architecture) -> list[Tunable]:
    """Return how tokens are drawn, by top-p alone and by all filters."""

    def works(config: Config, device: torch.device) -> list[Work]:
        logits, out = _logits(device), torch.empty(FEW_ROWS, dtype=torch.int64, device=device)
        made = []
        for top_k, min_p in ((0, 0.0), (50, 0.02)):
            temperature, top_p, least = (
                torch.full((FEW_ROWS,), value, device=device) for value in (0.8, 0.95, min_p)
            )
            kept = torch.full((FEW_ROWS,), top_k, dtype=torch.int32, device=device)
            seeds = torch.arange(FEW_ROWS, device=device)
            rows = SamplingRows(temperature, kept, top_p, least, seeds, seeds)
            made.append(bind(sample.launch_sample, logits, rows, out, config))
        return made

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"SIZE": config.block_size, "MAX": config.max_listed}
        return cases_of(sample, architecture, config, sizes, "fp32")

    def is_valid(config: Config) -> bool:
        return int(config.max_listed) % int(config.block_size) == 0

    values = {
        "block_size": (512, 1024, 2048, 4096),
        "max_listed": (2048, 4096, 8192),
        "num_warps": (4, 8, 16, 32),
    }
    entry = Entry("all sizes", _sampling_launch.choose_sample(architecture), values, is_valid)
    return [Tunable(entry, works, cases)]


def penalties(architecture: Architecture) -> list[Tunable]:
    """Return how a row's tokens are penalised, of contexts of 2,000 tokens."""

    def works(config: Config, device: torch.device) -> list[Work]:
        listed = 2000 * FEW_ROWS
        factors = torch.ones(3, FEW_ROWS, device=device)
        rows = torch.arange(FEW_ROWS + 1, device=device)
        given = Penalties(
            rows[:-1],
            rows * 2000,
            torch.randint(0, _VOCAB, (listed,), device=device),
            torch.ones(listed, dtype=torch.int32, device=device),
            *factors,
        )
        return [bind(apply_penalties.launch_apply_penalties, _logits(device), given, config)]

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"SIZE": config.block_size}
        return cases_of(apply_penalties, architecture, config, sizes, "fp32")

    entry = pieces_entry("all sizes", _sampling_launch.choose_penalties(architecture))
    return [Tunable(entry, works, cases)]


def bitmasks(architecture: Architecture) -> list[Tunable]:
    """Return how rows are masked."""

    def works(config: Config, device: torch.device) -> list[Work]:
        mask = torch.full((FEW_ROWS, _VOCAB // 32), -1, dtype=torch.int32, device=device)
        rows = torch.arange(FEW_ROWS, device=device)
        launch = apply_token_bitmask.launch_apply_token_bitmask
        return [bind(launch, _logits(device), mask, rows, config)]

    def cases(config: Config) -> list[KernelCase]:
        sizes = {"SIZE": config.block_size}
        return cases_of(apply_token_bitmask, architecture, config, sizes, "fp32")

    entry = pieces_entry("all sizes", _sampling_launch.choose_bitmask(architecture))
    return [Tunable(entry, works, cases)]


def _logits(device: torch.device) -> torch.Tensor:
    return torch.randn(FEW_ROWS, _VOCAB, device=device)
