"""A pickled file of weights, read as tensors and nothing else, behind what a safetensors file has.

torch runs no code of the file this way, but its reader has had holes: only who names the option
`allow_pickle` comes here. Knows nothing of names or of what tensors mean.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch

from octavo.errors import ConfigError, first_line

_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True, slots=True)
class PickledSlice:
    """A tensor before it is read: what is known of it, and parts of it."""

    tensor: torch.Tensor

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> torch.Tensor:
        return self.tensor[part]

    def get_shape(self) -> list[int]:
        """Return its sizes, outermost first."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Return its type by the name that safetensors has for it, or else by torch's."""
        return _DTYPE_NAMES.get(self.tensor.dtype, str(self.tensor.dtype))


class PickledFile:
    """The tensors of one file.

    Raises:
        ConfigError: the file is damaged, or holds more than tensors by name.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Files of the newer form stay on disk until a tensor is copied.
            values = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
            # The end of a file that is cut off comes as an error without words.
            reason = first_line(error) if str(error) else "it is cut off"
            raise ConfigError(
                f"{path} is damaged or holds more than tensors, and nothing else of a pickled "
                f"file is loaded: {reason}"
            ) from None
        if not isinstance(values, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in values.items()
        ):
            raise ConfigError(f"{path} must hold tensors by name and nothing else")
        self._tensors: dict[str, torch.Tensor] = values

    def keys(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> PickledSlice:
        """Return a tensor to be read, which may be backed by the file."""
        return PickledSlice(self._tensors[name])
