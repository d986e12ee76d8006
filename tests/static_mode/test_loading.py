"""Checkpoints and options that the traditional mode refuses, and what it makes of memory."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.engine_choice import load_chosen
from octavo.errors import ConfigError
from octavo.host_resources import host_memory
from octavo.llm import LLM
from octavo.model.pretrained import load_pretrained
from octavo.sampling_params import SamplingParams
from octavo.static_engine.engine import StaticEngine
from octavo.static_engine.memory import RowBytes, choose_num_blocks, measure_row

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_mapping(
        {"model": str(folder), "device": "cpu", "cpu_threads": 1, **options}
    )


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a checkpoint, with other config fields."""

    def make(name: str, **fields: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoint(name), folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return folder

    return make


def test_what_has_no_native_code_is_served_so_by_itself(checkpoint: Checkpoint) -> None:
    assert isinstance(load_chosen(config_of(checkpoint("mamba"))), StaticEngine)


def test_the_mode_serves_any_model_if_it_is_asked_for(
    checkpoint: Checkpoint, generate_alone: Callable[..., list[int]]
) -> None:
    llm = LLM(str(checkpoint("llama")), model_impl="static", device="cpu", cpu_threads=1)
    assert isinstance(llm.engine, StaticEngine)
    (answer,) = llm.generate([[20, 30, 40]], SamplingParams(temperature=0, max_tokens=8))
    assert list(answer.token_ids) == generate_alone("llama", [20, 30, 40], 8)


def test_tensors_that_do_not_fit_are_named(copy: Callable[..., Path]) -> None:
    folder = copy("bloom")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = tensors.pop("transformer.h.1.mlp.dense_4h_to_h.bias")
    tensors["transformer.extra"] = bias
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"do not fit its config; missing: transformer\.h\.1\.mlp\.dense_4h_to_h\.bias; "
        r"unexpected: transformer\.extra$",
    ):
        load_pretrained(config_of(folder))


def test_tensors_of_another_shape_are_named(copy: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"wrong shape: .*word_embeddings\.weight"):
        load_pretrained(config_of(copy("bloom", vocab_size=300)))


def test_a_damaged_file_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("bloom")
    (folder / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or not a "):
        load_pretrained(config_of(folder))


def test_a_checkpoint_without_weights_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("bloom")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors do not exist"):
        load_pretrained(config_of(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"holds only pickled weights, which are refused"):
        load_pretrained(config_of(folder))


def test_weights_are_drawn_where_speed_alone_counts(
    copy: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy("bloom")
    (folder / "model.safetensors").unlink()
    loaded = load_pretrained(config_of(folder, load_format="dummy", dtype="bfloat16"))
    assert loaded.module.dtype is torch.bfloat16
    warning = f"weights of {folder} are drawn at random: its answers mean nothing"
    assert warning in caplog.messages


def test_a_quantized_checkpoint_is_refused_by_name(copy: Callable[..., Path]) -> None:
    folder = copy("bloom", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"^the checkpoint is quantized "):
        load_pretrained(config_of(folder))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^the checkpoint's architecture is 'BertForMaskedLM', "):
        load_pretrained(config_of(tmp_path))


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = copy("bloom", model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)
    (folder / "own.py").write_text(
        "import transformers\n"
        "class OwnConfig(transformers.BloomConfig):\n"
        "    model_type = 'own'\n"
        "class OwnForCausalLM(transformers.BloomForCausalLM):\n"
        "    config_class = OwnConfig\n"
    )
    with pytest.raises(ConfigError, match=r"set option trust_remote_code to true if you trust"):
        load_pretrained(config_of(folder))
    loaded = load_pretrained(config_of(folder, trust_remote_code=True))
    assert loaded.name == "OwnForCausalLM"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("quantization", "int8", "^option quantization is 'int8' but must be 'none' in the trad"),
        ("tensor_parallel_size", 2, "^option tensor_parallel_size is 2 but must be 1 in the trad"),
        ("pipeline_parallel_size", 2, "^option pipeline_parallel_size is 2 but must be 1 in "),
        ("enable_lora", True, "^option enable_lora is True but must be False in the traditional "),
        ("preemption_mode", "swap", "^option preemption_mode is 'swap' but must be 'auto' or "),
        ("max_model_len", 129, "^option max_model_len is 129 but the model's context is 128 "),
    ],
)
def test_an_option_without_a_meaning_fails_the_load(
    option: str, value: Any, message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=message):
        StaticEngine.load(config_of(checkpoint("mpt"), **{option: value}))


def test_a_row_takes_its_state_and_its_tokens(checkpoint: Checkpoint) -> None:
    """Two layers of float32: keys and values of 32 columns, or a state of fixed size."""
    assert measure_row(load_pretrained(config_of(checkpoint("mpt")))) == RowBytes(0, 2 * 2 * 32 * 4)
    state = 64 * (8 + 4)  # of 64 channels: 8 of the state, and 4 columns for the convolution
    assert measure_row(load_pretrained(config_of(checkpoint("mamba")))) == RowBytes(
        2 * state * 4, 0
    )
    # Two layers keep a state and 3 more columns for the convolution, in their modules; the third
    # has keys and values of 8 columns for a window of 16 tokens, in a cache that is not returned
    # and counts its tokens.
    in_modules, window = 2 * (32 + 32 * 3) * 4, 15 * 2 * 8 * 4 + 8
    griffin = measure_row(load_pretrained(config_of(checkpoint("recurrent_gemma"))))
    assert griffin == RowBytes(in_modules + window, 0)


def test_the_log_of_a_load_has_no_advice_of_transformers(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()
    load_chosen(config_of(checkpoint("mamba")))
    told = [record.getMessage() for record in caplog.records if "transformers" in record.name]
    assert told == []


@pytest.mark.parametrize(
    ("options", "row", "num_blocks"),
    [
        ({"num_kv_blocks": 7}, RowBytes(0, 64), 7),
        ({"kv_cache_memory_bytes": 10 * 16 * 64}, RowBytes(0, 64), 10),
        ({"kv_cache_memory_bytes": 10 * 16 * 64}, RowBytes(16 * 32, 64), 8),
        ({"kv_cache_memory_bytes": 2**30}, RowBytes(0, 64), 4 * 8 + 2),
        ({"kv_cache_memory_bytes": 2**30}, RowBytes(64, 0), 4 * 8 + 2),
    ],
)
def test_blocks_are_what_memory_holds_and_rows_can_use(
    options: dict[str, int], row: RowBytes, num_blocks: int
) -> None:
    config = EngineConfig("model", max_num_seqs=4, **options)
    assert choose_num_blocks(config, row, 128, CPU, host_memory()) == num_blocks


def test_memory_for_no_batch_fails_the_load() -> None:
    config = EngineConfig("model", max_num_seqs=4, kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match=r"^1,000 bytes hold no batch of 4 rows of 300 bytes "):
        choose_num_blocks(config, RowBytes(300, 64), 128, CPU, host_memory())
