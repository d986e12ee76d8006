"""Turns a GGUF file into a transformers checkpoint directory, once, in the user's cache.

After this module nothing in Octavo knows that the model was ever a GGUF file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.errors import ConfigError
from octavo.model.gguf_families import model_config
from octavo.model.gguf_metadata import GgufFile, part_paths
from octavo.model.gguf_tokenizer import build_tokenizer, write_tokenizer
from octavo.model.gguf_weights import CheckpointTensor, write_safetensors

logger = logging.getLogger(__name__)

#: Part of the cache key: raise it whenever the same file would convert differently.
CONVERTER_VERSION = 3

_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_HASHED_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF file holds, its weights not read yet."""

    file: GgufFile
    config: dict[str, Any]
    """Of transformers."""
    tensors: Sequence[CheckpointTensor]
    tokenizer: Tokenizer


def gguf_checkpoint(path: Path) -> Path:
    """Return the checkpoint directory of a GGUF file, converting it on first use.

    Safe against interruption and against other processes: the directory appears by one rename,
    under a lock that ends with the process that holds it.

    Raises:
        ConfigError: the file cannot be read, what it holds is not supported, or there is no room.
    """
    cache = _cache_directory()
    directory = cache / f"{path.stem}-{_content_key(part_paths(path))}"
    if _is_whole(directory):
        return directory
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache / f"{directory.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(directory):
                _convert_into_place(path, directory)
    except OSError as error:
        raise ConfigError(
            f"no checkpoint can be written to {cache}: {error}; "
            "set XDG_CACHE_HOME to a folder that is writable and has room"
        ) from error
    return directory


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Write the transformers checkpoint of `gguf_path` into the existing, empty `directory`.

    Quantised weights are gguf's own dequantisation rounded to bfloat16, others what they are. The
    config says bfloat16, which all are computed in unless option dtype says otherwise.

    Raises:
        ConfigError: the file cannot be read, or what it holds is not supported.
    """
    model = read_gguf(gguf_path)
    write_tokenizer(model.file, model.tokenizer, directory)
    _write_json(directory / "config.json", model.config)
    ids = {key: value for key, value in model.config.items() if key.endswith("_token_id")}
    _write_json(directory / "generation_config.json", ids)
    write_safetensors(model.file, directory / "model.safetensors", model.tensors)


def read_gguf(path: Path) -> GgufModel:
    """Read all of a GGUF file but its weights.

    Raises:
        ConfigError: the file cannot be read, or what it holds is not supported.
    """
    # Imported late: torch takes seconds, and a file that was converted is found without it.
    from octavo.model.gguf_tensors import checkpoint_tensors

    try:
        file = GgufFile(path)
        config = model_config(file)
        tensors = checkpoint_tensors(file, config)
        return GgufModel(file, config, tensors, build_tokenizer(file, config["vocab_size"]))
    except (ConfigError, OSError):
        raise
    except Exception as error:
        # Anyone can have written the file, so values may be of any size.
        raise ConfigError(
            f"{path} holds what cannot be converted: {type(error).__name__}, {error}"
        ) from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "checkpoints"


def _content_key(paths: Sequence[Path]) -> str:
    """Return a key that changes with the files' content, at a cost that their size does not change.

    Hashing gigabytes at each start would be slow. The header (vocabulary, shapes, types) is hashed;
    weights changed in place show in the modification time. The path is left out, so that the
    same file reached by two paths converts once.
    """
    digest = hashlib.sha256(f"{CONVERTER_VERSION}".encode())
    for path in paths:
        status = path.stat()
        digest.update(f" {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()[:16]


def _is_whole(directory: Path) -> bool:
    # A cache cleaner may take single files out of a directory that was whole once.
    return all((directory / name).is_file() for name in _FILES)


def _convert_into_place(path: Path, directory: Path) -> None:
    """Convert `path` beside `directory`, then rename; the caller holds the lock of `directory`."""
    partial = directory.with_name(f".{directory.name}.partial")
    for leftover in (partial, directory):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    logger.info("converting %s to a checkpoint in %s", path.name, directory)
    start_s = time.monotonic()
    try:
        convert_gguf(path, partial)
        for name in _FILES:
            _flush_to_disk(partial / name)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.info("converted %s in %.1f s", path.name, time.monotonic() - start_s)


def _flush_to_disk(path: Path) -> None:
    # Without this a power cut may leave the rename on disk but not what it names.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
