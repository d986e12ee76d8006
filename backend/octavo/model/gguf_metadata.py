"""Typed reading of a GGUF file's key-value header; knows nothing of what the values are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from octavo.errors import ConfigError

_MISSING = object()


class GgufFile:
    """An open GGUF file: its tensors, and its metadata, which remembers what was asked for.

    Raises:
        ConfigError: the file is missing or is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"GGUF file {path} does not exist")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, TypeError, OSError) as error:
            raise ConfigError(f"{path} is not a whole GGUF file: {error}") from None
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Return the value of `key`, or `default`; without one a missing key is a ConfigError."""
        self._asked.add(key)
        field = self._fields.get(key)
        if field is not None:
            return field.contents()
        if default is _MISSING:
            raise ConfigError(f"{self.path.name} has no {key!r} in its metadata")
        return default

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`, outermost dimension first."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path.name} has no tensor {name!r}")
        # GGUF lists dimensions innermost first.
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def get_float(self, key: str, default: Any = _MISSING) -> float:
        """Return a float32 value as the shortest decimal that means it (1e-05, not 9.99e-06)."""
        return float(str(np.float32(self.get(key, default))))

    def unread_keys(self, prefix: str) -> list[str]:
        """Return the keys under `prefix` that nothing has asked for, sorted."""
        return sorted(
            key for key in self._fields if key.startswith(prefix) and key not in self._asked
        )
