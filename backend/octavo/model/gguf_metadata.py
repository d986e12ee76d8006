"""A GGUF file, whole or split, and typed reading of its metadata.

Knows nothing of what the values are for, but for those that tell how a file is split.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.errors import ConfigError, shown
from octavo.model.gguf_header import GgufTensor, read_header

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MISSING: Any = object()
_T = TypeVar("_T")


class GgufFile:
    """An open GGUF file: its tensors, and its metadata, which remembers what was asked for.

    A key that begins with a dot is one of the file's architecture. Every getter takes a default,
    without which a missing key is an error.

    Raises:
        ConfigError: the file or a part of it is missing or damaged, or parts disagree.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = [read_header(part) for part in part_paths(path)]
        self._fields = headers[0].fields
        self._asked: set[str] = set()
        self.tensors: dict[str, GgufTensor] = {}
        for header in headers:
            twice = next((name for name in header.tensors if name in self.tensors), None)
            if twice is not None:
                raise ConfigError(f"GGUF tensor {shown(twice)} is in two parts of {path}")
            self.tensors |= header.tensors
        count, total = (self.integer(f"split.{key}", 0) for key in ("count", "tensors.count"))
        if count > 1 and (count, total) != (len(headers), len(self.tensors)):
            raise ConfigError(
                f"{path} says it has {count:,} parts with {total:,} tensors, but there are "
                f"{len(headers):,} with {len(self.tensors):,}; a part keeps the name it had"
            )

    def has(self, key: str) -> bool:
        """Return whether there is such a key."""
        return self._whole(key) in self._fields

    def is_list(self, key: str) -> bool:
        """Return whether there is such a key, with a list."""
        return isinstance(self._fields.get(self._whole(key)), list)

    def text(self, key: str, default: Any = _MISSING) -> str:
        """Return a text."""
        return self._typed(key, default, str, "a text")

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        return self._typed(key, default, bool, "true or false")

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """Return an integer from 0 on."""
        value = self._typed(key, default, int, "an integer")
        if value is not default and value < 0:
            raise self._wrong(key, value, "at least 0")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """Return a float32 as the shortest decimal that means it (1e-05, not 9.99e-06)."""
        value = self._typed(key, default, float, "a float")
        return value if value is default else float(str(np.float32(value)))

    def items(self, key: str, of: type[_T], default: Any = _MISSING) -> list[_T]:
        """Return a list of values of one type."""
        values = self._typed(key, default, list, "a list")
        if values is not default and values and type(values[0]) is not of:
            raise self._wrong(key, values, f"a list of {of.__name__}")
        return values

    def unread_keys(self) -> list[str]:
        """Return the keys of its architecture that nothing has asked for, sorted."""
        prefix = self._whole(".")
        return sorted(
            key for key in self._fields if key.startswith(prefix) and key not in self._asked
        )

    def _whole(self, key: str) -> str:
        return f"{self.text('general.architecture')}{key}" if key.startswith(".") else key

    def _typed(self, key: str, default: Any, kind: type[_T], allowed: str) -> _T:
        key = self._whole(key)
        self._asked.add(key)
        value = self._fields.get(key, default)
        if value is _MISSING:
            raise ConfigError(f"{self.path.name} has no {key!r} in its metadata")
        if value is not default and type(value) is not kind:
            raise self._wrong(key, value, allowed)
        return value  # type: ignore[no-any-return]

    def _wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        # A list may have millions of items.
        value = value[:8] if isinstance(value, list) else value
        return ConfigError(
            f"GGUF metadata {self._whole(key)} is {shown(value)} but must be {allowed}"
        )


def part_paths(path: Path) -> list[Path]:
    """Return the files that a GGUF file is split into, itself where it is whole.

    Raises:
        ConfigError: it or another part does not exist, or it is not the first part.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        paths = [path]
    else:
        stem, number, count = match[1], int(match[2]), int(match[3])
        if number != 1:
            raise ConfigError(f"{path} is part {number} of {count}; name the first one")
        paths = [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for part in paths:
        if not part.is_file():
            raise ConfigError(f"GGUF file {part} does not exist")
    return paths
