"""What is known of a model without its weights: its config, and what its files take.

Nothing is converted, and of a hub nothing is downloaded but configs. Knows nothing of how models
are served.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.local.demo_model import DEMO_NAME, demo_gguf
from octavo.model.checkpoint import read_json
from octavo.model.gguf_checkpoint import read_gguf
from octavo.model.gguf_metadata import part_paths
from octavo.model.image_models import reads_images
from octavo.model.location import PICKLES, checkpoint_directory, hub_configs, is_hub_id, local_path

_SAFETENSORS = ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A model before its weights are read."""

    directory: Path
    """Where its config.json is."""
    file_bytes: int
    """What the files of its weights take."""
    has_weights: bool
    """Whether the weights are in the directory too."""

    @property
    def reads_images(self) -> bool:
        """Whether the whole model reads images beside text."""
        return reads_images(read_json(self.directory / "config.json"))


@contextmanager
def glimpse(config: EngineConfig) -> Iterator[Glimpse]:
    """Look at the model that an engine is configured for; the directory may go afterwards.

    Raises:
        ConfigError: there is no such model, it has no weights that may be read, or the hub cannot
            be reached.
    """
    model = config.model
    if model == DEMO_NAME or model.endswith(".gguf"):
        path = demo_gguf() if model == DEMO_NAME else local_path(model)
        with tempfile.TemporaryDirectory(prefix="octavo-check-") as folder:
            yield _glimpse_gguf(path, Path(folder))
    elif is_hub_id(model):
        directory, sizes = hub_configs(model, trust_remote_code=config.trust_remote_code)
        yield Glimpse(directory, _file_bytes(config, sizes), has_weights=False)
    else:
        directory = checkpoint_directory(model)
        sizes = {file.name: file.stat().st_size for file in directory.iterdir() if file.is_file()}
        is_dummy = config.load_format == "dummy"
        file_bytes = 0 if is_dummy else _file_bytes(config, sizes)
        yield Glimpse(directory, file_bytes, has_weights=not is_dummy)


def _glimpse_gguf(path: Path, directory: Path) -> Glimpse:
    config = read_gguf(path).config
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = sum(part.stat().st_size for part in part_paths(path))
    return Glimpse(directory, size, has_weights=False)


def _file_bytes(config: EngineConfig, sizes: Mapping[str, int]) -> int:
    """Return what the weight files take that would be read.

    Raises:
        ConfigError: there are none, or they are pickled and may not be.
    """
    for patterns in (_SAFETENSORS, PICKLES):
        found = [size for name, size in sizes.items() if any(fnmatch(name, p) for p in patterns)]
        if not found:
            continue
        if patterns is PICKLES and not config.allow_pickle:
            raise ConfigError(
                f"{config.model} has only pickled weights, which are refused because such files "
                "can carry code; convert them to safetensors, or set option allow_pickle to true "
                "if you trust where they come from"
            )
        return sum(found)
    raise ConfigError(f"{config.model} has no weights: no file *.safetensors is there")
