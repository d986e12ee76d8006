"""The list of a server's adapters: which there are, where they lie and what is in their files.

Knows nothing of how adapters are computed or held.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError, shown
from octavo.model.checkpoint import read_json
from octavo.model.location import local_path
from octavo.model.lora_files import LoraFiles

MAX_NAME_LENGTH = 256

_ITEM_BYTES = 4

Shapes = Mapping[str, tuple[int, int]]
"""(out, in) of linear layers by name."""


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter whose files were whole, and fitted the model, when they were looked at."""

    name: str
    directory: Path
    version: bytes
    """Digest of its files."""
    ranks: Mapping[str, int]
    """Of what it adds to linear layers, by name."""
    num_bytes: int
    """What that takes in float32."""


def survey_adapters(config: EngineConfig, shapes: Shapes) -> tuple[ListedAdapter, ...]:
    """Read and check all adapters of an engine, one after the other; nothing of them is kept.

    Args:
        config: the options.
        shapes: of the layers that an adapter may change.

    Raises:
        ConfigError: the list cannot be used, or an adapter is damaged or does not fit; names it.
    """
    listed = []
    for name, directory in adapter_directories(config).items():
        try:
            listed.append(survey_adapter(name, directory, shapes, config.max_lora_rank))
        except ConfigError as error:
            raise ConfigError(f"adapter {name!r}: {error}") from None
    return tuple(listed)


def survey_adapter(name: str, directory: Path, shapes: Shapes, max_rank: int) -> ListedAdapter:
    """Read and check one adapter; nothing of it is kept.

    Raises:
        ConfigError: it is damaged or does not fit; does not say which adapter it is.
    """
    files = LoraFiles(directory, shapes, max_rank)
    for module in files.modules:
        files.pair(module)
    ranks = {module: files.rank_of(module) for module in files.modules}
    num_bytes = sum(rank * sum(shapes[module]) * _ITEM_BYTES for module, rank in ranks.items())
    return ListedAdapter(name, directory, files.version, ranks, num_bytes)


def adapter_directories(config: EngineConfig) -> dict[str, Path]:
    """Return the directory of each adapter of an engine by its name, in the order of their numbers.

    Raises:
        ConfigError: the options contradict each other, or the list cannot be used.
    """
    if not config.enable_lora:
        return {}
    if config.multi_lora is None:
        raise ConfigError("option enable_lora is true but multi_lora does not name a file")
    return read_adapter_list(Path(config.multi_lora))


def read_adapter_list(path: Path) -> dict[str, Path]:
    """Return the directory of each adapter by its name, as a `multi_lora.json` lists them.

    A relative path begins where the file is.

    Raises:
        ConfigError: the file cannot be read, a name is there twice, is empty or too long, or a
            directory is not there.
    """
    directories: dict[str, Path] = {}
    for name, value in read_json(path, refuses_twins=True).items():
        if not 1 <= len(name) <= MAX_NAME_LENGTH or not _is_text(name):
            raise ConfigError(
                f"{path} names {shown(name)}, but names have 1 to {MAX_NAME_LENGTH} characters "
                "of UTF-8"
            )
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{path} has {shown(value)} for {shown(name)} but must have a path")
        directory = path.parent / local_path(value)
        if not os.path.isdir(directory):
            raise ConfigError(f"{path} has adapter {shown(name)} in {directory}, no directory")
        directories[name] = directory
    return directories


def _is_text(name: str) -> bool:
    """Tell whether a string of JSON, which may hold half a pair, can be sent and logged."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)
