"""The tensors of a GGUF file written as safetensors: quantised ones are dequantised to bfloat16.

Those of float32 and float16 stay what they are. Each is read once, some rows at a time, so memory
use is that of a few rows and not of the model. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from octavo.errors import ConfigError
from octavo.model.gguf_header import GgufTensor, stored_bytes
from octavo.model.gguf_metadata import GgufFile

#: Values that are dequantised at once.
_CHUNK_VALUES = 2**22


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint, and where a GGUF file has it."""

    name: str
    shape: tuple[int, ...]
    source: str
    """Name of the tensor in the file."""
    index: int | None
    """The one of its outermost dimension; None for all of the tensor."""
    rows: npt.NDArray[np.int64] | None = None
    """Order of its rows in the checkpoint; None for that in the file."""
    added: float = 0.0
    """What is added to its values."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How numbers are written."""

    name: str
    """What safetensors calls it."""
    item_bytes: int
    convert: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]


def write_safetensors(file: GgufFile, path: Path, tensors: Sequence[CheckpointTensor]) -> None:
    """Write tensors of `file`, whose types `check_types` knows, to `path`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    formats = {tensor.name: _format(file, tensor) for tensor in tensors}
    # The largest numbers first, so that all lie at multiples of their size.
    tensors = sorted(tensors, key=lambda tensor: -formats[tensor.name].item_bytes)
    end = 0
    for tensor in tensors:
        start, end = end, end + formats[tensor.name].item_bytes * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": formats[tensor.name].name,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for values in _chunks(file.tensors[tensor.source], tensor):
                # Adding nothing would take the sign of zeros.
                values = values + np.float32(tensor.added) if tensor.added else values
                out.write(formats[tensor.name].convert(values).data)


def _format(file: GgufFile, tensor: CheckpointTensor) -> _Format:
    """Return as what a tensor is written: no value is rounded that the file has not rounded."""
    kind = file.tensors[tensor.source].kind
    if kind == GGMLQuantizationType.F32:
        return _FLOAT32
    if kind == GGMLQuantizationType.F16:
        return _FLOAT32 if tensor.added else _FLOAT16
    return _BFLOAT16


def check_types(file: GgufFile) -> None:
    """Refuse a file with a tensor that cannot be dequantised.

    Raises:
        ConfigError: names the first such tensor.
    """
    of_kind = {tensor.kind: tensor.name for tensor in reversed(file.tensors.values())}
    for kind, name in of_kind.items():
        try:
            quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(
                f"GGUF tensor {name!r} is stored as {kind.name}, which gguf cannot dequantise; "
                "requantise the file"
            ) from None


def _chunks(stored: GgufTensor, tensor: CheckpointTensor) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the values of a tensor in its order, float32, some rows at a time."""
    data = stored.data
    if tensor.index is not None:
        size = stored_bytes(tensor.shape, stored.kind)
        data = data[tensor.index * size : (tensor.index + 1) * size]
    # Of a tensor that is one row, rows in another order are values.
    row_values = tensor.shape[-1] if len(tensor.shape) > 1 or tensor.rows is None else 1
    rows = data.reshape(-1, stored_bytes((row_values,), stored.kind))
    step = max(1, _CHUNK_VALUES // row_values)
    for start in range(0, len(rows), step):
        part: Any = slice(start, start + step)
        yield quants.dequantize(
            rows[part] if tensor.rows is None else rows[tensor.rows[part]], stored.kind
        )


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of each value, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Half of what is cut off is added, less one where the kept part is even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    # What stands for no number may have wrapped.
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)


_FLOAT32 = _Format("F32", 4, np.ascontiguousarray)
_FLOAT16 = _Format("F16", 2, lambda values: values.astype(np.float16))
_BFLOAT16 = _Format("BF16", 2, round_to_bfloat16)
