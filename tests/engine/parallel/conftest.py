"""Engines whose model lies on several ranks, in processes of their own, and one rank to compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelRunner
from octavo.executor.parallel.rank_zero import RankZero


class Grid(NamedTuple):
    """A tiny model on tensor groups of `tp` ranks in `pp` stages."""

    tp: int
    pp: int
    config: EngineConfig
    runner: RankZero


def make_config(model: str, **options: Any) -> EngineConfig:
    values = {
        "num_kv_blocks": 256,
        "swap_space_bytes": 4 << 20,
        "cpu_threads": 2,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 40,
        "step_timeout_s": 20.0,
    }
    return EngineConfig.from_mapping({"model": model, **values, **options})


@pytest.fixture(scope="session")
def make_options(checkpoints):
    """Make the options of an engine over a tiny checkpoint, by default that of llama."""
    return lambda family="llama", **options: make_config(str(checkpoints[family]), **options)


@pytest.fixture(
    scope="module",
    params=[(2, 1), (1, 2), (1, 3), (2, 2)],
    ids=lambda size: f"tp{size[0]}-pp{size[1]}",
)
def grid(request, checkpoints) -> Iterator[Grid]:
    """Give a model on each of some grids; its ranks end with the last test that has it."""
    tp, pp = request.param
    config = make_config(
        str(checkpoints["llama"]), tensor_parallel_size=tp, pipeline_parallel_size=pp
    )
    runner = RankZero(config)
    yield Grid(tp, pp, config, runner)
    runner.close()


@pytest.fixture(scope="module")
def one_rank(checkpoints) -> ModelRunner:
    """Give the same model on one rank."""
    return ModelRunner(make_config(str(checkpoints["llama"])))


@pytest.fixture
def make_drivers(grid, one_rank, drive, make_options):
    """Make drivers of two engines: over the grid, and over one rank."""

    def make(num_blocks: int = 256, num_host_blocks: int = 64, **options: Any):
        runners = (grid.runner, one_rank)
        config = make_options(**options)
        return [drive(config, runner, num_blocks, num_host_blocks) for runner in runners]

    return make
