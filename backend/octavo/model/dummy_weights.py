"""Weights that no file holds: for benchmarks of a model's shape alone.

Every tensor follows from its name and size, so that all ranks draw the same ones.
"""

from __future__ import annotations

import logging
import math
import zlib
from pathlib import Path

import torch

from octavo.model.spec import ModelSpec
from octavo.model.tensor_names import expected_tensors

logger = logging.getLogger(__name__)


def warn_of_dummy_weights(directory: Path) -> None:
    """Log that the model of a checkpoint's config is about to get random weights."""
    logger.warning("weights of %s are drawn at random: its answers mean nothing", directory)


class DummyTensors:
    """Draw the tensors of a checkpoint when they are asked for, as float32.

    Linear weights keep the size of what they are given; norms change nothing; biases are zero.

    Args:
        spec: of the model.
        device: where to draw them.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._shapes = expected_tensors(spec)
        self._norm_weight = 0.0 if spec.norm.adds_one else 1.0
        self._std = 1.0 / math.sqrt(spec.hidden_size)
        self._generator = torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        """Return a tensor, of each dimension from the first what is wanted."""
        tensor = torch.empty(self._shapes[name], device=self._generator.device)
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(self._norm_weight)
        else:
            self._generator.manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(std=self._std, generator=self._generator)
        return tensor[part or ...]
