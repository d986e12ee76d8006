"""The header of one GGUF file: its key-values, and where each tensor lies.

Every length is held against what is left of the file before anything is made by it, so that a file
that lies costs no memory and no time. Knows nothing of what keys and tensors are for.

    magic, version, number of tensors, number of key-values
    key-values      key, kind, value
    tensors         name, sizes from the innermost on, type, offset
    data            of all tensors, each at a multiple of the alignment
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from octavo.errors import ConfigError, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
#: Far beyond any file: what is made of the header's texts and numbers is copied out of it.
_MOST_NAME_BYTES = 2**16 - 1
_MOST_TEXT_BYTES = 2**24
_MOST_ITEMS = 2**24
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as it lies in a file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first."""
    data: npt.NDArray[np.uint8]
    """Its bytes, in the mapped file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that a file says of itself."""

    fields: dict[str, Any]
    """Numbers, texts, flags and lists of these."""
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file and map its tensors.

    Raises:
        ConfigError: it is no GGUF file, of a version or byte order that is not supported,
            truncated or damaged; says where.
    """
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ConfigError(f"{path} is not a whole GGUF file: {error}") from None
    return _HeaderReader(path, content).read()


class _HeaderReader:
    """Reads a header from front to back; `at` is how far it has come, in bytes."""

    def __init__(self, path: Path, content: memoryview) -> None:
        self._path = path
        self._content = content
        self._at = 0
        self._where = "its first bytes"

    def read(self) -> GgufHeader:
        if self._take(4).tobytes() != _MAGIC:
            raise self._damaged("it does not begin with the letters GGUF")
        version = self._integer("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            form = f"big-endian, version {swapped}" if swapped in _VERSIONS else f"{version}"
            raise ConfigError(
                f"{self._path} is a GGUF file of version {form}; allowed are little-endian files "
                f"of versions {' and '.join(map(str, _VERSIONS))}"
            )
        num_tensors, num_fields = self._integer("<Q"), self._integer("<Q")
        fields: dict[str, Any] = {}
        for index in range(num_fields):
            key = self._new_name("key", index, num_fields, fields)
            fields[key] = self._value()
        return GgufHeader(fields, self._tensors(num_tensors, fields))

    def _tensors(self, count: int, fields: dict[str, Any]) -> dict[str, GgufTensor]:
        places: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for index in range(count):
            name = self._new_name("tensor", index, count, places)
            places[name] = self._place()
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {shown(alignment)}, no power of two")
        start, end = -(-self._at // alignment) * alignment, 0
        tensors = {}
        for name, (shape, kind, offset) in sorted(places.items(), key=lambda item: item[1][2]):
            self._where = f"tensor {shown(name)}"
            if offset % alignment or offset < end:
                raise self._damaged(
                    f"its offset {offset:,} is not aligned or within another's data"
                )
            self._at, end = start + offset, offset + stored_bytes(shape, kind)
            data = np.frombuffer(self._take(end - offset), np.uint8)
            tensors[name] = GgufTensor(name, kind, shape, data)
        return {name: tensors[name] for name in places}

    def _new_name(self, what: str, index: int, count: int, known: Container[str]) -> str:
        """Read the name of the next key or tensor; errors name it from then on."""
        self._where = f"{what} {index + 1:,} of {count:,}"
        name = self._text(_MOST_NAME_BYTES)
        self._where = f"{what} {shown(name)}"
        if name in known:
            raise self._damaged("it is there twice")
        return name

    def _place(self) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        num_dimensions = self._integer("<I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"it has {num_dimensions:,} dimensions")
        shape = tuple(self._integer("<Q") for _ in range(num_dimensions))[::-1]
        number = self._integer("<I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._damaged(f"its type, {number}, is not known") from None
        if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise self._damaged(f"its shape is {list(shape)}, which {kind.name} cannot have")
        return shape, kind, self._integer("<Q")

    def _value(self) -> Any:
        kind = self._kind()
        if kind == GGUFValueType.STRING:
            return self._text(_MOST_TEXT_BYTES)
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self._kind(), self._integer("<Q")
        if count > _MOST_ITEMS:
            raise self._damaged(f"it has {count:,} items")
        if kind == GGUFValueType.ARRAY:
            raise self._damaged("it holds arrays of arrays")
        if kind == GGUFValueType.STRING:
            return [self._text(_MOST_TEXT_BYTES) for _ in range(count)]
        return self._numbers(kind, count)

    def _kind(self) -> GGUFValueType:
        number = self._integer("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"its kind, {number}, is not known") from None

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _text(self, most: int) -> str:
        size = self._integer("<Q")
        if size > most:
            raise self._damaged(f"it has a text of {size:,} bytes")
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            raise self._damaged("it has a text that is not UTF-8") from None

    def _integer(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._content):
            raise self._damaged(f"it ends at byte {len(self._content):,}, before byte {end:,}")
        self._at, start = end, self._at
        return self._content[start:end]

    def _damaged(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._path} is not a whole GGUF file: {reason} (at {self._where})")


def stored_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Return the size of a tensor of a shape and type."""
    block_values, block_bytes = map(int, GGML_QUANT_SIZES[kind])
    return math.prod(shape) // block_values * block_bytes
