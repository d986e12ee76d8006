"""An adapter as it lies on disk: the files that PEFT saved.

Knows which names and shapes a model's linear layers have, and nothing of how they are computed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize

from octavo.errors import ConfigError
from octavo.model.checkpoint import read_file
from octavo.model.lora_config import LoraConfig
from octavo.model.tensor_check import some_names
from octavo.model.text_tensors import text_name

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = (".lora_A.weight", ".lora_B.weight")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DIGEST_BYTES = 32

_Tensor = dict[str, Any]
"""Dtype, shape and data."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to a linear layer: x @ down.T @ up.T."""

    down: torch.Tensor
    """[rank, in] float32"""
    up: torch.Tensor
    """[out, rank] float32, with the adapter's factor."""


class LoraFiles:
    """One adapter's directory, read once and checked as a whole; its weights module by module.

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
        data = _read(self._path)
        self._config = LoraConfig.read(directory / _CONFIG)
        self._tensors = self._of_text(_tensors_of(self._path, data))
        self.version = _digest(_read(directory / _CONFIG), data)
        """Digest of all that it is made of."""
        self.modules = self._check_names(shapes)
        """The linear layers that it changes."""
        for module in self.modules:
            self._check_shapes(module, shapes[module], max_rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of what it adds to a linear layer, 0 for nothing."""
        return self._config.rank_of(module) if module in self.modules else 0

    def pair(self, module: str) -> LowRankPair:
        """Return what is added to one of `modules`.

        Raises:
            ConfigError: it has NaN or infinity.
        """
        down, up = (self._float(f"{_PREFIX}{module}{end}") for end in _ENDINGS)
        scaled = up * self._config.scaling_of(module)
        for end, tensor in zip(_ENDINGS, (down, scaled), strict=True):
            if not torch.isfinite(tensor).all():
                raise ConfigError(
                    f"{self._path} has NaN or infinity in {module}{end}, of numbers in float32 "
                    "with the adapter's factor; all must be finite"
                )
        return LowRankPair(down, scaled)

    def _float(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        flat = torch.frombuffer(tensor["data"], dtype=_DTYPES[tensor["dtype"]])
        return flat.view(tensor["shape"]).float()

    def _of_text(self, tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        """Return tensors by the names of a text model, without those of what reads images."""
        found: dict[str, _Tensor] = {}
        for stored, tensor in tensors.items():
            name: str | None = stored
            if stored.startswith(_PREFIX):
                module = text_name(stored.removeprefix(_PREFIX))
                name = None if module is None else f"{_PREFIX}{module}"
            if name in found:
                raise ConfigError(f"{self._path} has {name} twice, by two names that it has had")
            if name is not None:
                found[name] = tensor
        if len(found) < len(tensors):
            count = len(tensors) - len(found)
            logger.info("images are off: %d tensors of %s are not used", count, self._path)
        return found

    def _check_names(self, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
        """Return the modules that the tensors belong to, in the model's order."""
        names = set(self._tensors)
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
            part = self._tensors[f"{_PREFIX}{module}{end}"]
            if part["shape"] != allowed:
                raise ConfigError(
                    f"{self._path} has {module}{end} of shape {part['shape']} but it must be "
                    f"{allowed}, for the adapter's rank there is {rank}"
                )
            if part["dtype"] not in _DTYPES:
                raise ConfigError(
                    f"{self._path} has {module}{end} of {part['dtype']} but must have one of "
                    f"{', '.join(_DTYPES)}"
                )


def _read(path: Path) -> bytes:
    """Return all of a file, which may change or vanish later."""
    # Unlike a path's own methods these never raise: a folder may be closed to us.
    if not os.path.exists(path) and os.path.exists(path.with_suffix(".bin")):
        raise ConfigError(f"{path.with_suffix('.bin')} is pickled; convert it to {_WEIGHTS}")
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _tensors_of(path: Path, data: bytes) -> dict[str, _Tensor]:
    """Return dtype, shape and data of each tensor by name."""
    try:
        return dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from None


def _digest(*files: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for data in files:
        digest.update(hashlib.blake2b(data).digest())
    return digest.digest()
