from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from octavo.errors import ConfigError
from octavo.model import gguf_checkpoint as module
from octavo.model.gguf_checkpoint import gguf_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that conversions go to in this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo" / "checkpoints"


def test_a_file_is_converted_once_and_again_when_it_changes(tiny_gguf: Path, cache: Path) -> None:
    first = gguf_checkpoint(tiny_gguf)
    assert first.parent == cache
    assert first.name.startswith("tiny-")
    made = (first / "config.json").stat().st_mtime_ns
    assert gguf_checkpoint(tiny_gguf) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    os.utime(tiny_gguf, (1, 1))
    assert gguf_checkpoint(tiny_gguf) != first


def test_the_same_file_by_another_path_is_not_converted_again(
    tiny_gguf: Path, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / "tiny.gguf"
    link.hardlink_to(tiny_gguf)
    assert gguf_checkpoint(link) == gguf_checkpoint(tiny_gguf)


def test_a_failed_conversion_leaves_nothing(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_safetensors", fail)
        with pytest.raises(KeyboardInterrupt):
            gguf_checkpoint(tiny_gguf)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert (gguf_checkpoint(tiny_gguf) / "model.safetensors").is_file()


def die_in_mid_conversion(path: Path) -> None:
    module.write_safetensors = lambda *_: os._exit(9)
    gguf_checkpoint(path)


def test_a_killed_conversion_is_cleaned_up_and_done_again(tiny_gguf: Path, cache: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=die_in_mid_conversion, args=(tiny_gguf,)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(list(cache.glob(".*.partial"))) == 1
    directory = gguf_checkpoint(tiny_gguf)
    AutoModelForCausalLM.from_pretrained(directory)
    assert list(cache.glob(".*.partial")) == []


def test_a_checkpoint_that_lost_a_file_is_made_again(tiny_gguf: Path, cache: Path) -> None:
    directory = gguf_checkpoint(tiny_gguf)
    (directory / "tokenizer.json").unlink()
    assert gguf_checkpoint(tiny_gguf) == directory
    assert (directory / "tokenizer.json").is_file()


def convert_and_report(path: Path, barrier: Any, results: Any) -> None:
    convert = module.convert_gguf

    def counted(*arguments: Path) -> None:
        results.put("converted")
        convert(*arguments)

    module.convert_gguf = counted
    barrier.wait()
    results.put(str(gguf_checkpoint(path)))


def test_two_processes_at_once_convert_once(tiny_gguf: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=convert_and_report, args=(tiny_gguf, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join()
    assert sorted(answers) == sorted(["converted", *[str(gguf_checkpoint(tiny_gguf))] * 2])


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GGUF file .*none.gguf does not exist"):
        gguf_checkpoint(tmp_path / "none.gguf")


def test_a_cache_that_cannot_be_written_is_a_config_error(tiny_gguf: Path, cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"no checkpoint can be written .* set XDG_CACHE_HOME"):
        gguf_checkpoint(tiny_gguf)
