"""The text of a checkpoint that reads images too: its tensors, by the names of a text model.

Knows how such checkpoints call their parts, and nothing of what the tensors mean.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from octavo.model.checkpoint import Checkpoint

_TEXT = "model."
#: What the names of the text begin with: as they have always been, and as transformers calls them
#: in memory, where the projection has no prefix.
_OLDER, _NEWER = "language_model.", "model.language_model."
_IMAGE_PARTS = ("vision_tower", "multi_modal_projector")
_LEFT_OUT = tuple(f"{prefix}{part}." for part in _IMAGE_PARTS for prefix in ("", _TEXT))

logger = logging.getLogger(__name__)


def text_name(name: str) -> str | None:
    """Return what a text model calls a part of a model that reads images; None for what reads them.

    Names of a text model stay as they are.
    """
    if name.startswith(_LEFT_OUT):
        return None
    if name.startswith(_NEWER):
        return f"{_TEXT}{name.removeprefix(_NEWER)}"
    return name.removeprefix(_OLDER)


class TextTensors:
    """A checkpoint without what it has for images, read as one of its text model.

        a text model      older                             newer
        model.layers.0.   language_model.model.layers.0.    model.language_model.layers.0.
        lm_head.          language_model.lm_head.           lm_head.

    Args:
        checkpoint: of the whole model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        names = checkpoint.names
        self._is_newer = any(name.startswith(_NEWER) for name in names)
        self._left_out = [name for name in names if name.startswith(_LEFT_OUT)]

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._checkpoint

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Refuse tensors that are not exactly the expected ones, as `Checkpoint.check` does."""
        stored = {self._stored(name): shape for name, shape in expected.items()}
        self._checkpoint.check(stored, (*ignored, *self._left_out))
        if self._left_out:
            logger.info(
                "images are off: %d tensors of %s, %s bytes, are not read",
                len(self._left_out),
                " and ".join(_IMAGE_PARTS),
                f"{self._checkpoint.num_bytes(self._left_out):,}",
            )

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        """Return a tensor of the text, as `Checkpoint.tensor` does."""
        return self._checkpoint.tensor(self._stored(name), *part)

    def _stored(self, name: str) -> str:
        if not self._is_newer:
            return f"{_OLDER}{name}"
        return f"{_NEWER}{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name
