"""Checkpoints that hold the experts of a layer joined, as transformers does in memory.

It writes them one by one unless it is told not to, and reads both; so does Octavo. Knows nothing of
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from octavo.model.checkpoint import Checkpoint
from octavo.model.expert_names import expert_names
from octavo.model.spec import ModelSpec
from octavo.model.tensor_names import expected_tensors, layer_prefix
from octavo.model.text_tensors import TextTensors
from octavo.model.weight_reader import TensorSource

_ROUTER, _GATE_UP, _DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def checked_tensors(
    spec: ModelSpec, checkpoint: Checkpoint | TextTensors, ignored: Iterable[str]
) -> TensorSource:
    """Check that a checkpoint has the tensors of a spec; return where they are read from.

    Args:
        spec: of the whole model.
        checkpoint: of the whole model, or its text.
        ignored: as `Checkpoint.check` takes them.

    Raises:
        ConfigError: it has not.
    """
    expected = expected_tensors(spec)
    layers = [index for index in range(spec.num_layers) if spec.has_experts(index)]
    if not any(f"{layer_prefix(index)}{_GATE_UP}" in checkpoint for index in layers):
        checkpoint.check(expected, ignored)
        return checkpoint
    places: dict[str, _Place] = {}
    single, joined = _layer(spec)
    for index in layers:
        prefix = layer_prefix(index)
        for name, place in single.items():
            places[f"{prefix}{name}"] = replace(place, name=f"{prefix}{place.name}")
            del expected[f"{prefix}{name}"]
        expected |= {f"{prefix}{name}": shape for name, shape in joined.items()}
    checkpoint.check(expected, ignored)
    return JoinedExperts(checkpoint, places)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is that a checkpoint has as a part of another."""

    name: str
    expert: int | None = None
    """None for all of it."""
    first_row: int = 0


class JoinedExperts:
    """A checkpoint of joined experts, read as one of single ones.

        experts.gate_up_proj   [experts, gate, then up, hidden]
        experts.down_proj      [experts, hidden, inner]

    Args:
        checkpoint: of the whole model.
        places: of what it has as a part of another tensor, by the name that it is asked for.
    """

    def __init__(self, checkpoint: TensorSource, places: Mapping[str, _Place]) -> None:
        self._checkpoint = checkpoint
        self._places = places

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._checkpoint

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        """Return a tensor, as TensorSource does; of an expert, its rows are to be told."""
        place = self._places.get(name)
        if place is None or place.expert is None:
            return self._checkpoint.tensor(name if place is None else place.name, *part)
        rows, *columns = part
        first, expert = place.first_row, slice(place.expert, place.expert + 1)
        if rows != slice(None):
            rows = slice(rows.start + first, rows.stop + first)
        return self._checkpoint.tensor(place.name, expert, rows, *columns)[0]


def _layer(spec: ModelSpec) -> tuple[dict[str, _Place], dict[str, tuple[int, ...]]]:
    """Return where a layer's single tensors are, and the joined ones it has."""
    experts = spec.experts
    assert experts is not None
    count, hidden, inner = experts.num_experts, spec.hidden_size, experts.intermediate_size
    names = expert_names(experts)
    places = {f"{names.router}.weight": _Place(_ROUTER)}
    for index in range(count):
        gate, up, down = names.of(index)
        places[f"{gate}.weight"] = _Place(_GATE_UP, index)
        places[f"{up}.weight"] = _Place(_GATE_UP, index, inner)
        places[f"{down}.weight"] = _Place(_DOWN, index)
    joined = {
        _ROUTER: (count, hidden),
        _GATE_UP: (count, 2 * inner, hidden),
        _DOWN: (count, hidden, inner),
    }
    return places, joined
