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
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.model.gguf_metadata import GgufFile
from octavo.model.gguf_tokenizer import write_tokenizer
from octavo.model.gguf_weights import write_safetensors

logger = logging.getLogger(__name__)

#: Part of the cache key: raise it whenever the same file would convert differently.
CONVERTER_VERSION = 1

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_HASHED_BYTES = 4 * 2**20


def gguf_checkpoint(path: Path) -> Path:
    """Return the checkpoint directory of a GGUF file, converting it on first use.

    Safe against interruption and against other processes: the directory appears by one rename,
    under a lock that ends with the process that holds it.

    Raises:
        ConfigError: the file cannot be read, what it holds is not supported, or there is no room.
    """
    if not path.is_file():
        raise ConfigError(f"GGUF file {path} does not exist")
    cache = _cache_directory()
    directory = cache / f"{path.stem}-{_content_key(path)}"
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

    Weights are gguf's own dequantisation rounded to bfloat16.

    Raises:
        ConfigError: the file cannot be read, or what it holds is not supported.
    """
    try:
        _convert(gguf_path, directory)
    except (ConfigError, OSError):
        raise
    except Exception as error:
        # Anyone can have written the file, so values may be of any type and size.
        raise ConfigError(
            f"{gguf_path} holds what cannot be converted: {type(error).__name__}, {error}"
        ) from error


def _convert(gguf_path: Path, directory: Path) -> None:
    file = GgufFile(gguf_path)
    config = model_config(file)
    write_tokenizer(file, directory)
    _write_json(directory / "config.json", config)
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(directory / "generation_config.json", ids)
    # llama.cpp stores only the llama architecture in its interleaved rotary order.
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    interleaved = config["model_type"] == "llama"
    write_safetensors(file, directory / "model.safetensors", heads if interleaved else {})


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the transformers config of a GGUF file.

    Raises:
        ConfigError: what it holds is not supported.
    """
    arch = file.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not supported; allowed are {', '.join(_ARCHITECTURES)}"
        )
    num_heads = file.get(f"{arch}.attention.head_count")
    hidden_size = file.get(f"{arch}.embedding_length")
    head_dim = file.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "dtype": "bfloat16",
        "vocab_size": file.tensor_shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.get(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.get(f"{arch}.context_length"),
        "rms_norm_eps": file.get_float(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": file.get_float(f"{arch}.rope.freq_base", 10_000.0),
        },
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    _check_no_variants(file, arch, head_dim)
    return config


def _token_ids(file: GgufFile) -> dict[str, Any]:
    end = [file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot")]
    ends = list(dict.fromkeys(index for index in end if index is not None))
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", None),
    }


def _check_no_variants(file: GgufFile, arch: str, head_dim: int) -> None:
    """Refuse a model whose metadata asks for anything that `_model_config` does not express."""
    for key in ("rope.dimension_count", "attention.value_length"):
        size = file.get(f"{arch}.{key}", head_dim)
        if size != head_dim:
            raise ConfigError(f"GGUF {arch}.{key} is {size} but must be the head size, {head_dim}")
    file.get(f"{arch}.vocab_size", None)
    unknown = file.unread_keys(f"{arch}.")
    if unknown:
        raise ConfigError(f"GGUF metadata {', '.join(unknown)} is not supported")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "checkpoints"


def _content_key(path: Path) -> str:
    """Return a key that changes with the file's content, at a cost that its size does not change.

    Hashing gigabytes at each start would be slow. The header (vocabulary, shapes, types) is hashed;
    weights changed in place show in the modification time. The path is left out, so that the
    same file reached by two paths converts once.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {status.st_size} {status.st_mtime_ns}".encode())
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
