"""Puts together the command line and the environment of one `tritonserver`.

Writes the model repository that the command names when none is given. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.local import bundle
from octavo.local.addresses import listen_address
from octavo.local.server_options import ServerOptions

GPU_DRIVER = Path("/proc/driver/nvidia/version")
# Without a driver these only lead to warnings.
CPU_FLAGS = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0")


def server_command(options: ServerOptions, ports: Mapping[str, int], runtime: Path) -> list[str]:
    """Return the command of a server on `ports` (by name) that keeps its files in `runtime`."""
    repository = options.repository
    if repository is None:
        repository = runtime / "models"
        inspect = {"allow_inspect": True} if options.is_private else {}
        bundle.write_repository(repository, {"model": "demo", **_given(options), **inspect})
    return [
        str(bundle.server_binary()),
        *(f"--model-repository={path}" for path in (repository, *options.extra_repositories)),
        f"--backend-directory={runtime / 'backends'}",
        f"--backend-config=python,shm-region-prefix-name={runtime.name}",
        *(f"--{kind}-address={listen_address(options.host, kind)}" for kind in ports),
        *(f"--{kind}-port={port}" for kind, port in ports.items()),
        f"--exit-timeout-secs={max(1, int(options.grace_s))}",
        *(() if GPU_DRIVER.exists() else CPU_FLAGS),
        *options.flags,
    ]


def engine_overrides(options: ServerOptions) -> dict[str, str]:
    """Return the variables that set engine options for the models of a given repository."""
    if options.repository is None:
        return {}
    return {f"OCTAVO_{name.upper()}": f"{value}" for name, value in _given(options).items()}


def _given(options: ServerOptions) -> dict[str, str | int]:
    """Return the engine options that the server was asked for."""
    names = ("model", "device", *bundle.RANK_OPTIONS)
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
