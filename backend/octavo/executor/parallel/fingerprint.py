"""Tells whether two ranks read the same checkpoint and adapters, without reading their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

_KINDS = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth")


def fingerprint(directory: Path, adapters: Mapping[str, Path]) -> str:
    """Return a digest of a checkpoint's settings, and of the names and sizes of all files.

    Links that lead nowhere are none: a cache of downloads has them once something was deleted.

    Args:
        directory: of the checkpoint.
        adapters: directories of adapters by name.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for name, folder in [("", directory), *adapters.items()]:
        digest.update(b"\0\0" + name.encode(errors="surrogatepass"))
        found = {path for kind in _KINDS for path in folder.glob(kind) if path.is_file()}
        for path in sorted(found):
            digest.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return digest.hexdigest()
