"""What modules keep in plain attributes from one call to the next, as some state-space models do.

A batch must not begin with what one before it has left: a prompt of one token looks like the next
token of that one. Knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_MOST_DEPTH = 8
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
_ABSENT = object()


class ModuleState:
    """The attributes of a model's modules, but for weights and buffers, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = {module: dict(_attributes(module)) for module in model.modules()}

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that modules hold now and did not hold before."""
        return [tensor for *_, value in self._changed() for tensor in tensors_in(value)]

    def clear(self) -> None:
        """Let attributes that have got tensors be what they were before."""
        for module, name, _ in list(self._changed()):
            before = self._before[module].get(name, _ABSENT)
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)

    def _changed(self) -> Iterator[tuple[torch.nn.Module, str, Any]]:
        for module, before in self._before.items():
            for name, value in _attributes(module):
                is_new = value is not before.get(name, _ABSENT)
                if is_new and next(tensors_in(value), None) is not None:
                    yield module, name, value


def tensors_in(value: Any, depth: int = _MOST_DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: of lists, mappings and attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for item in _parts(value):
            yield from tensors_in(item, depth - 1)


def _parts(value: object) -> Iterable[Any]:
    """Return what is in a value that is no tensor, if anything is."""
    if isinstance(value, torch.nn.Module | str | int | float | None):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if hasattr(value, "__dict__"):
        return vars(value).values()
    if isinstance(value, list | tuple):
        return value
    return ()


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _OF_ALL_MODULES)
