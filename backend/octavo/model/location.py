"""Where a checkpoint lies: in a directory, in a GGUF file, or at a hub.

Knows nothing of what is in it, and needs no torch: who only wants the tokenizer asks here too.
"""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ConfigError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def checkpoint_directory(
    model: str, *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> Path:
    """Return the directory of a checkpoint directory, a GGUF file or a hub id.

    A GGUF file is converted, and a hub checkpoint downloaded, into the user's cache: its Python
    and its pickled files only if they may be used.

    Raises:
        ConfigError: there is no such model, or it cannot be read or downloaded.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        # Here, for other checkpoints are served where the package that reads GGUF is missing.
        from octavo.model.gguf_checkpoint import gguf_checkpoint

        return gguf_checkpoint(path)
    if path.exists():
        raise ConfigError(f"model {model!r} is a file but must be a directory or a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} does not exist; name a checkpoint directory, a .gguf file or a "
            "hub id like 'organisation/name'"
        )
    return _download(model, trust_remote_code, allow_pickle)


def _download(hub_id: str, trust_remote_code: bool, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, *(("*.py",) if trust_remote_code else ())]
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=patterns))
        if allow_pickle and not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(hub_id, allow_patterns=[*patterns, *PICKLES]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {hub_id!r} is no local path and cannot be downloaded from the hub: {reason}"
        ) from None
    return directory
