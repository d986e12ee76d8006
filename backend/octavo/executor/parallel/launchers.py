"""Chooses who starts the ranks beside rank zero."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.executor.parallel.launcher import Launcher
from octavo.executor.parallel.mp_launcher import MpLauncher
from octavo.executor.parallel.ray_launcher import RayLauncher


def make_launcher(config: EngineConfig) -> Launcher:
    """Return the launcher that `distributed_executor_backend` names.

    Raises:
        ConfigError, EngineError: it cannot be used here.
    """
    if config.distributed_executor_backend == "ray":
        return RayLauncher(config)
    return MpLauncher(config.num_ranks)
