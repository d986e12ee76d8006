"""Weight files of a checkpoint directory: which tensors there are, and each one when asked.

Safetensors, sharded or not. Pickled files are refused unless the operator allows them by name, and
are never read where safetensors are. Knows names, shapes and dtypes, and nothing of what the
tensors mean.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ConfigError, shown
from octavo.model.location import PICKLES
from octavo.model.pickled_weights import PickledFile
from octavo.model.tensor_check import check_shapes, some_names

_SINGLE = "model.safetensors"
_PICKLED_SINGLE = "pytorch_model.bin"
_INDEX_ENDING = ".index.json"
_FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
#: Of what else a file may hold; of a dtype that is not here, a byte an element is counted.
_OTHER_BYTES = {"I64": 8, "I32": 4, "I16": 2}


class Checkpoint:
    """Tensors of one checkpoint directory, read lazily and one at a time.

    Args:
        directory: holds `model.safetensors` or an index of shards.
        allow_pickle: where there are no safetensors, read `pytorch_model.bin` or its shards.

    Raises:
        ConfigError: there are no weight files that may be read, or one is damaged or disagrees
            with the index.
    """

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        single = _single_name(directory, allow_pickle)
        index = directory / f"{single}{_INDEX_ENDING}"
        indexed = {} if (directory / single).exists() else _read_index(index)
        for path in _weight_files(directory, single, indexed):
            file = _open(path) if single == _SINGLE else PickledFile(path)
            names = set(file.keys())
            for name in names & self._file_of.keys():
                raise ConfigError(f"tensor {name} is in both {self._path_of[name]} and {path}")
            self._file_of.update(dict.fromkeys(names, file))
            self._path_of.update(dict.fromkeys(names, path))
        for name, file_name in indexed.items():
            if name not in self._path_of or self._path_of[name].name != file_name:
                raise ConfigError(f"{index} says tensor {name} is in {file_name}, but it is not")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Refuse a checkpoint whose tensors are not exactly the expected ones.

        Args:
            expected: shape by name.
            ignored: endings of names, or whole ones, that may be there and are not used.

        Raises:
            ConfigError: names what is missing, unexpected, mis-shaped or not of a float dtype.
        """
        endings = tuple(ignored)
        slices = {
            name: file.get_slice(name)
            for name, file in self._file_of.items()
            if name in expected or not name.endswith(endings)
        }
        kinds = {name: part.get_dtype() for name, part in slices.items() if name in expected}
        not_float = [f"{name} {kind}" for name, kind in kinds.items() if kind not in _FLOAT_DTYPES]
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        check_shapes(str(self._directory), expected, shapes, not_float)

    def num_elements(self) -> int:
        """Return how many numbers all tensors have together."""
        shapes = (file.get_slice(name).get_shape() for name, file in self._file_of.items())
        return sum(math.prod(shape) for shape in shapes)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Return what some tensors take in the files."""
        slices = [self._file_of[name].get_slice(name) for name in names]
        return sum(math.prod(part.get_shape()) * _item_bytes(part.get_dtype()) for part in slices)

    def first_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first tensor of a float dtype; None if there is none."""
        kinds = (file.get_slice(name).get_dtype() for name, file in self._file_of.items())
        return next((_FLOAT_DTYPES[kind] for kind in kinds if kind in _FLOAT_DTYPES), None)

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        """Return a tensor that may be backed by the file; copy what must outlive it.

        Args:
            name: of the tensor.
            part: what is wanted of each dimension, from the first; no more is read.
        """
        try:
            tensor: torch.Tensor = self._file_of[name].get_slice(name)[part or ...]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._path_of[name]} cannot be read: {error}") from None
        return tensor


def read_json(path: Path, *, refuses_twins: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: of the file.
        refuses_twins: whether no object in it may have a name twice; else the last one counts.

    Raises:
        ConfigError: the file is missing, unreadable, or holds something else.
    """
    make_object = _without_twins if refuses_twins else dict
    try:
        values = json.loads(read_file(path).decode(), object_pairs_hook=make_object)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return values


def read_file(path: Path) -> bytes:
    """Return all of a file, which may change or vanish later.

    Raises:
        OSError: it cannot be read, or is no file: a pipe may keep who reads it for ever.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("it is no file")
    return path.read_bytes()


def _item_bytes(kind: str) -> int:
    dtype = _FLOAT_DTYPES.get(kind)
    return _OTHER_BYTES.get(kind, 1) if dtype is None else dtype.itemsize


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = Counter(name for name, _ in pairs)
    if twins := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{shown(twins[0])} is there more than once")
    return dict(pairs)


def _single_name(directory: Path, allow_pickle: bool) -> str:
    """Return the file name of whole weights, in the form that is to be read.

    Raises:
        ConfigError: all that is there is pickled, and not allowed.
    """
    if any((directory / f"{_SINGLE}{ending}").exists() for ending in ("", _INDEX_ENDING)):
        return _SINGLE
    if not any(any(directory.glob(pattern)) for pattern in PICKLES):
        return _SINGLE
    if not allow_pickle:
        raise ConfigError(
            f"{directory} holds only pickled weights, which are refused because such files can "
            "carry code; convert them to safetensors, or set option allow_pickle to true if you "
            "trust where they come from"
        )
    return _PICKLED_SINGLE


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor by the index of a sharded checkpoint, else nothing."""
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path} must have a weight_map from tensor names to file names")
    for file_name in weight_map.values():
        # Nothing outside the directory is ever opened.
        is_name = isinstance(file_name, str) and Path(file_name).name == file_name
        if not is_name or file_name in ("", "..") or "\0" in file_name:
            raise ConfigError(f"{path} names {shown(file_name)}, which is not a file name")
    return weight_map


def _weight_files(directory: Path, single: str, indexed: Mapping[str, str]) -> list[Path]:
    paths = [directory / name for name in sorted(set(indexed.values())) or [single]]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"weights {some_names(missing)} do not exist")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {error}") from None
