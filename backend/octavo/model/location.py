"""Where a checkpoint lies: in a directory, in a GGUF file, or at a hub.

Knows nothing of what is in it, and needs no torch: who only wants the tokenizer asks here too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError, first_line

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: What a model is known by before it is downloaded.
_HUB_CONFIGS = ("config.json", "generation_config.json")
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
    path = local_path(model)
    if os.path.isdir(path):
        return path
    if path.suffix == ".gguf":
        # Here, for other checkpoints are served where the package that reads GGUF is missing.
        from octavo.model.gguf_checkpoint import gguf_checkpoint

        return gguf_checkpoint(path)
    if os.path.exists(path):
        raise ConfigError(f"model {model!r} is a file but must be a directory or a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} does not exist; name a checkpoint directory, a .gguf file or a "
            "hub id like 'organisation/name'"
        )
    return _download(model, trust_remote_code, allow_pickle)


def configured_checkpoint(config: EngineConfig) -> Path:
    """Return the directory of the checkpoint that an engine is configured for.

    Raises:
        ConfigError: as `checkpoint_directory` does.
    """
    return checkpoint_directory(
        config.model,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )


def local_path(text: str) -> Path:
    """Return what someone wrote as a path; `~` is their home, where there is such a user.

    Ask `os.path` about it, not the path: that raises for one that is too long for any file.
    """
    return Path(os.path.expanduser(text))


def is_hub_id(model: str) -> bool:
    """Return whether a model lies at a hub and not in a file system."""
    is_local = model.endswith(".gguf") or os.path.exists(local_path(model))
    return not is_local and _HUB_ID.fullmatch(model) is not None


def hub_configs(hub_id: str, *, trust_remote_code: bool = False) -> tuple[Path, Mapping[str, int]]:
    """Return a directory of a hub checkpoint's configs, and the size in bytes of all its files.

    No weights are downloaded; of its Python, all, and only if it may be used.

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    patterns = [*_HUB_CONFIGS, *(("*.py",) if trust_remote_code else ())]
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=patterns))
        files = HfApi().model_info(hub_id, files_metadata=True).siblings or ()
    except Exception as error:  # of HTTP libraries that change with the version of the hub's client
        raise _not_at_hub(hub_id, error) from None
    return directory, {file.rfilename: file.size or 0 for file in files}


def _not_at_hub(hub_id: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model {hub_id!r} is no local path and cannot be downloaded from the hub: "
        f"{first_line(error)}"
    )


def _download(hub_id: str, trust_remote_code: bool, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, *(("*.py",) if trust_remote_code else ())]
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=patterns))
        if allow_pickle and not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(hub_id, allow_patterns=[*patterns, *PICKLES]))
    except (OSError, ValueError) as error:
        raise _not_at_hub(hub_id, error) from None
    return directory
