"""Adapters as they lie on disk: the list of a server's, and the PEFT files of each.

Knows which names and shapes a model's linear layers have, and nothing of how they are computed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.config import EngineConfig
from octavo.errors import ConfigError, shown
from octavo.model.checkpoint import read_json
from octavo.model.location import local_path
from octavo.model.lora_config import LoraConfig
from octavo.model.tensor_check import some_names

MAX_NAME_LENGTH = 256

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("BF16", "F16", "F32")
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to a linear layer: x @ down.T @ up.T."""

    down: torch.Tensor
    """[rank, in] float32"""
    up: torch.Tensor
    """[out, rank] float32, with the adapter's factor."""


def adapter_directories(config: EngineConfig) -> dict[str, Path]:
    """Return the directory of each adapter of an engine by its name, in the order of their slots.

    Raises:
        ConfigError: the options contradict each other, or the list cannot be used.
    """
    if not config.enable_lora:
        return {}
    if config.multi_lora is None:
        raise ConfigError("option enable_lora is true but multi_lora does not name a file")
    directories = read_adapter_list(Path(config.multi_lora))
    if config.max_loras is not None and len(directories) > config.max_loras:
        raise ConfigError(
            f"{config.multi_lora} names {len(directories):,} adapters but option max_loras is "
            f"{config.max_loras:,}; all of them are in memory at once"
        )
    return directories


def read_adapter_list(path: Path) -> dict[str, Path]:
    """Return the directory of each adapter by its name, as a `multi_lora.json` lists them.

    A relative path begins where the file is.

    Raises:
        ConfigError: the file cannot be read, a name is too long, or a directory is not there.
    """
    directories: dict[str, Path] = {}
    for name, value in read_json(path).items():
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


class LoraFiles:
    """One adapter's directory: checked as a whole, read module by module.

    Args:
        directory: holds `adapter_config.json` and `adapter_model.safetensors`.
        shapes: (out, in) of each linear layer of the model that can be adapted, by name.
        max_rank: the largest rank that is taken.

    Raises:
        ConfigError: a file is missing, damaged, or does not fit the model; names what is wrong.
    """

    def __init__(
        self, directory: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int
    ) -> None:
        self._path = directory / _WEIGHTS
        self._config = LoraConfig.read(directory / _CONFIG)
        self._file = _open(self._path)
        self.version = _digest(directory / _CONFIG, self._path)
        """Digest of all that it is made of."""
        self.modules = self._check_names(shapes)
        """The linear layers that it changes."""
        for module in self.modules:
            self._check_shapes(module, shapes[module], max_rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of what it adds to a linear layer, 0 for nothing."""
        return self._config.rank_of(module) if module in self.modules else 0

    def pair(self, module: str) -> LowRankPair:
        """Read what is added to one of `modules`.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            down, up = (self._file.get_tensor(f"{_PREFIX}{module}{end}") for end in _ENDINGS)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from None
        return LowRankPair(down.float(), up.float() * self._config.scaling_of(module))

    def _check_names(self, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
        """Return the modules that the tensors belong to, in the model's order."""
        names = set(self._file.keys())
        modules = {
            name.removeprefix(_PREFIX).removesuffix(end)
            for name in names
            for end in _ENDINGS
            if name.endswith(end)
        }
        known = [module for module in shapes if module in modules]
        targeted = self._config.targeted(shapes)
        wanted = known if targeted is None else targeted
        expected = {
            f"{_PREFIX}{module}{end}" for module in modules.union(wanted) for end in _ENDINGS
        }
        faults = {
            "missing": expected - names,
            "of no linear layer that can be adapted": modules.difference(known),
            "not among target_modules": set(known).difference(wanted),
            "not of plain LoRA": names - expected,
        }
        texts = [f"{fault}: {some_names(sorted(each))}" for fault, each in faults.items() if each]
        if not known and not texts:
            texts = ["it has none"]
        if texts:
            raise ConfigError(f"the tensors in {self._path} do not fit; {'; '.join(texts)}")
        return tuple(known)

    def _check_shapes(self, module: str, shape: tuple[int, int], max_rank: int) -> None:
        rank = self._config.rank_of(module)
        if rank > max_rank:
            raise ConfigError(
                f"{self._path} has rank {rank} for {module} but option max_lora_rank is {max_rank}"
            )
        expected = ([rank, shape[1]], [shape[0], rank])
        for end, allowed in zip(_ENDINGS, expected, strict=True):
            part = self._file.get_slice(f"{_PREFIX}{module}{end}")
            if part.get_shape() != allowed:
                raise ConfigError(
                    f"{self._path} has {module}{end} of shape {part.get_shape()} but it must be "
                    f"{allowed}, for the adapter's rank there is {rank}"
                )
            if part.get_dtype() not in _DTYPES:
                raise ConfigError(
                    f"{self._path} has {module}{end} of {part.get_dtype()} but must have one of "
                    f"{', '.join(_DTYPES)}"
                )


def _open(path: Path) -> Any:
    if not path.exists() and path.with_suffix(".bin").exists():
        raise ConfigError(f"{path.with_suffix('.bin')} is pickled; convert it to {_WEIGHTS}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is missing, damaged or no safetensors file: {error}") from None


def _digest(*paths: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.digest()
