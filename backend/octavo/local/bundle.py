"""The Triton server inside the `nvidia-pytriton` wheel: where its parts lie and what they need.

The wheel's own backends directory cannot be used as it is (the stub of the running Python lies
elsewhere), and the server refuses a symbolic link to the backend's library, so the parts are
copied. Knows nothing of processes, ports or models.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from octavo.errors import ConfigError

MODEL_NAME = "octavo"
STUB = "triton_python_backend_stub"
#: Engine options whose product is the number of processes that compute.
RANK_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size")

_BACKEND_SOURCE = '''\
"""The `octavo` backend: every model that names it is served by this class."""

from octavo.triton_model.model import TritonPythonModel as TritonPythonModel
'''

_CONFIG = """\
backend: "octavo"
instance_group [
  {{
    kind: {kind}
    count: 1
  }}
]
"""


def find_wheel() -> Path:
    """Return the folder that holds the bundled server.

    Raises:
        ConfigError: the extra `local` is not installed.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the bundled Triton server is not installed; run scripts/setup in a checkout, "
            "or pip install '.[server]' nvidia-pytriton there"
        )
    return Path(spec.origin).parent / "tritonserver"


def server_binary() -> Path:
    """Return the path of the bundled `tritonserver`."""
    return find_wheel() / "bin" / "tritonserver"


def check_numpy(version: str) -> None:
    """Refuse a numpy with which the stub would crash at the first text.

    Raises:
        ConfigError: it is not numpy 1.
    """
    if not version.startswith("1."):
        raise ConfigError(
            f"numpy {version} is installed but the bundled Triton server needs numpy 1; "
            "run pip install 'numpy<2'"
        )


def write_backends(folder: Path) -> None:
    """Fill `folder` with the python backend for the running interpreter and with `octavo`.

    Raises:
        ConfigError: the wheel has no stub for the running Python version, or not for this numpy.
    """
    wheel = find_wheel()
    check_numpy(importlib.metadata.version("numpy"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / STUB
    if not stub.exists():
        raise ConfigError(f"the bundled Triton server has no stub for Python {version}")
    python = folder / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(wheel / "backends" / "python" / name, python)
    shutil.copy(stub, python)
    write_octavo_backend(folder)


def write_octavo_backend(folder: Path) -> None:
    """Add the Python-based backend `octavo` to a folder of backends, bundled or NVIDIA's own."""
    octavo = folder / MODEL_NAME
    octavo.mkdir()
    (octavo / "model.py").write_text(_BACKEND_SOURCE)


def write_repository(folder: Path, options: Mapping[str, str | int]) -> None:
    """Fill `folder` with a repository of one model, named `octavo`, that has these options."""
    num_ranks = math.prod(int(options.get(name, 1)) for name in RANK_OPTIONS)
    # KIND_MODEL leaves the choice of the devices to the engine's own options.
    is_engines_choice = str(options.get("device")).startswith("cuda") or num_ranks > 1
    kind = "KIND_MODEL" if is_engines_choice else "KIND_CPU"
    version = folder / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(kind=kind))
    (version / "engine.json").write_text(json.dumps(options, indent=2) + "\n")


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with paths that lead server and stub to this interpreter and libraries.

    Raises:
        ConfigError: the running Python has no shared library for the stub to embed.
    """
    # The stub embeds Python and takes its prefix from the first python3 on PATH.
    search = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    libraries = [str(find_wheel().parents[1] / "nvidia_pytriton.libs"), *_libpython_folder()]
    libraries += filter(None, [environment.get("LD_LIBRARY_PATH")])
    return {
        **environment,
        "PATH": os.pathsep.join(search),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONUNBUFFERED": "1",
    }


def _libpython_folder() -> list[str]:
    """Return the folder of the interpreter's shared library, or none if the linker knows it."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")):
        if folder and os.path.exists(os.path.join(folder, name)):
            return [folder]
    try:
        ctypes.CDLL(name)
    except OSError:
        raise ConfigError(
            f"{sys.base_prefix} has no {name}, which the Triton stub embeds; install it "
            f"(Debian, Ubuntu: apt install {name.partition('.so')[0]})"
        ) from None
    return []
