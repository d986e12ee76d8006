"""GGUF files that anyone may have made are converted or refused, whatever they say."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.model.gguf_checkpoint import convert_gguf

EDGES = (0, 1, 9, 12, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
LIES: list[Any] = ["text", 0, 2**31, 1.5, float("nan"), ["a"], [1, 2]]


def _refusal(path: Path, tmp_path: Path) -> str:
    """Convert a file and return nothing, or return why it is refused; anything else is raised."""
    directory = tmp_path / "converted"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        convert_gguf(path, directory)
    except ConfigError as error:
        return str(error)
    return ""


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_that_lies_is_converted_or_refused(
    data: st.DataObject, tiny_gguf: Path, tmp_path: Path
) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, min(9000, len(content) - 1))))
        match data.draw(st.sampled_from(["byte", "number", "gone", "cut"])):
            case "byte":
                content[at] = data.draw(st.integers(0, 255))
            case "number":
                content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(EDGES)))
            case "gone":
                del content[at : at + data.draw(st.sampled_from([1, 8, 1000]))]
            case "cut":
                content = content[: at + 1]
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(content)
    assert len(_refusal(path, tmp_path)) < 4000


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
    ],
)
def test_metadata_of_another_kind_is_converted_or_refused(
    key: str, make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    for lie in LIES:
        assert len(_refusal(make_gguf({key: lie}), tmp_path)) < 4000
