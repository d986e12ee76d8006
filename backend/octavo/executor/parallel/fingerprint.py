"""Tells whether two ranks read the same checkpoint, without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

_KINDS = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth")


def fingerprint(directory: Path) -> str:
    """Return a digest of a checkpoint's settings, and of the names and sizes of its files."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    paths = sorted({path for kind in _KINDS for path in directory.glob(kind)})
    for path in paths:
        digest.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return digest.hexdigest()
