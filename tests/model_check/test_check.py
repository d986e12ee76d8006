"""`octavo check` says what a load then finds, and why a model cannot be served."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.model_runner import ModelRunner
from octavo.local.demo_model import demo_checkpoint
from octavo.model import quantization
from octavo.model.loader import load_model
from octavo.model.quantization import QUANTIZED
from octavo.model.shard import Shard
from octavo.model_check.check import check_model
from octavo.model_check.features import features_off
from octavo.model_check.glimpse import glimpse
from octavo.model_check.needs import native_needs
from octavo.model_check.room import blocks_of_sequence
from octavo.sequence import Sequence
from octavo.static_engine.refusals import BEAMS, OPTIONS
from octavo.static_engine.runner import StaticRunner

Checkpoint = Callable[[str], Path]


def config_of(folder: Path | str, **options: Any) -> EngineConfig:
    values = {"model": str(folder), "device": "cpu", "cpu_threads": 1, "swap_space_bytes": 0}
    return EngineConfig.from_mapping({**values, **options})


def logged_weights(caplog: pytest.LogCaptureFixture) -> int:
    (text,) = re.findall(r"weights: ([\d,]+) bytes", caplog.text)
    return int(text.replace(",", ""))


PAGED = {
    "tied": ("llama", {"kv_cache_memory_bytes": 1_000_000}),
    "window": ("mistral", {"kv_cache_memory_bytes": 700_000, "dtype": "bfloat16"}),
    "experts": ("mixtral", {"kv_cache_memory_bytes": 700_000, "block_size": 32}),
    "adapter": ("gpt2", {"kv_cache_memory_bytes": 700_000, "max_model_len": 100}),
    "adapter with 8 bits": ("gpt2", {"num_kv_blocks": 9, "quantization": "int8"}),
    "adapter with a window": ("starcoder2", {"num_kv_blocks": 9, "dtype": "bfloat16"}),
    "8 bits": ("qwen2", {"num_kv_blocks": 77, "quantization": "int8"}),
    "dummy": ("qwen2", {"num_kv_blocks": 77, "load_format": "dummy"}),
}


@pytest.mark.parametrize("name", PAGED)
def test_a_load_finds_the_same_bytes_and_blocks(name, checkpoint: Checkpoint, caplog) -> None:
    model_type, options = PAGED[name]
    config = config_of(checkpoint(model_type), **options)
    report = check_model(config)
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(config)
    shape = runner._decoder.attention.shape
    assert report.tier == ("transformers" if "adapter" in name else "native")
    assert report.memory.weight_bytes == logged_weights(caplog)
    assert report.memory.kv_bytes_per_token * config.block_size == shape.bytes_per_block
    assert report.memory.num_blocks == runner.num_blocks
    assert report.max_model_len == runner.max_model_len
    assert report.dtype == str(shape.dtype).removeprefix("torch.")
    assert report.architecture == runner._decoder.spec.architecture


def test_the_demo_model_is_known_before_it_is_converted(caplog) -> None:
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 50_000_000}
    report = check_model(config_of("demo", **options))
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(config_of(demo_checkpoint(), **options))
    assert report.memory.weight_bytes == logged_weights(caplog)
    assert report.memory.num_blocks == runner.num_blocks
    assert 0 < report.memory.file_bytes < report.memory.weight_bytes
    assert report.memory.num_sequences == runner.num_blocks // 32


@pytest.mark.parametrize("model_type", ["mamba", "bloom"])
def test_the_traditional_mode_finds_what_shapes_tell(model_type, checkpoint: Checkpoint, caplog):
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 5_000_000, "max_num_seqs": 9}
    config = config_of(checkpoint(model_type), **options)
    report = check_model(config)
    with caplog.at_level(logging.INFO):
        runner = StaticRunner(config)
    memory = report.memory
    assert report.tier == "static"
    assert memory.weight_bytes == logged_weights(caplog)
    assert memory.num_blocks == runner.num_blocks
    off = {each.feature: each.reason for each in report.off}
    assert {"prefix cache", "several ranks", "LoRA", "int8", "fp8", "swap"} < off.keys()
    for each in (*OPTIONS, BEAMS):
        assert off[each.feature] == each.reason


@pytest.mark.parametrize(
    ("served", "expected"),
    [((), {"int8", "fp8"}), (("int8",), {"fp8"}), (("int8", "fp8"), set())],
)
def test_weights_of_8_bits_are_off_where_a_gpu_has_no_kernels_for_them(
    served, expected, monkeypatch
) -> None:
    types = tuple(QUANTIZED[name] for name in served)
    monkeypatch.setattr(quantization, "quantized_types", lambda device: types)
    off = features_off(
        config_of("x"), "native", torch.bfloat16, torch.device("cuda", 0), reads_images=False
    )
    assert {each.feature for each in off} & set(QUANTIZED) == expected


def test_weights_of_fp8_take_the_bytes_of_int8_and_are_refused_on_a_cpu(
    checkpoint: Checkpoint,
) -> None:
    configs = [config_of(checkpoint("mixtral"), quantization=name) for name in QUANTIZED]
    with glimpse(configs[0]) as seen:
        first, second = (native_needs(config, seen).weight_bytes for config in configs)
    assert first == second
    with pytest.raises(ConfigError, match=r"^option quantization is 'fp8', which takes a GPU of "):
        check_model(configs[1])


def test_figures_of_several_ranks_are_of_the_one_with_the_most(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen2")
    options = {"num_kv_blocks": 10, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    report = check_model(config_of(folder, **options))
    parts = [load_model(config_of(folder), Shard.of(rank, 1, 2)) for rank in range(2)]
    most = max(part.attention.shape.bytes_per_block for part in parts)
    assert report.memory.kv_bytes_per_token * 16 == most
    assert report.num_ranks == 2


@pytest.mark.parametrize("window", [None, 1, 16, 40, 100])
def test_a_decoding_sequence_holds_as_many_blocks_as_is_said(window, make_request) -> None:
    sequence = Sequence(make_request(prompt=1))
    manager = KVCacheManager(num_blocks=64, block_size=8, num_host_blocks=0, window=window)
    manager.admit(sequence, manager.find_cached(sequence))
    most = 0
    for length in range(1, 200):
        assert manager.allocate(sequence, length)
        most = max(most, 64 - manager.num_free_blocks)
        assert most == blocks_of_sequence(length, 8, window), length
        sequence.num_computed_tokens = length
        manager.publish(sequence)


def test_a_hub_is_asked_for_configs_and_sizes_alone(hub, checkpoint: Checkpoint) -> None:
    report = check_model(config_of("someone/tiny", num_kv_blocks=5))
    here = check_model(config_of(checkpoint("qwen2"), num_kv_blocks=5))
    assert report.memory == here.memory
    assert report.architecture == "Qwen2ForCausalLM"
    assert set(hub.asked) == {"config.json", "generation_config.json"}


def test_a_model_that_the_hub_does_not_have_is_said_so(hub) -> None:
    with pytest.raises(ConfigError, match=r"^model 'someone/else' is no local path and cannot be "):
        check_model(config_of("someone/else"))


@pytest.fixture
def spoil(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., str]:
    """Return a function that changes a copy of a checkpoint and returns why it is refused."""

    def change(edit: Callable[[Path], object], model_type: str = "qwen2", **options: Any) -> str:
        folder = tmp_path / model_type
        shutil.copytree(checkpoint(model_type), folder)
        edit(folder)
        with pytest.raises(ConfigError) as error:
            check_model(config_of(folder, **options))
        return str(error.value)

    return change


def edit_config(**fields: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "mamba"])
@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_are_refused_by_name(model_type, method, spoil) -> None:
    edit = edit_config(quantization_config={"quant_method": method})
    assert spoil(edit, model_type).startswith(
        f"the checkpoint is quantized ('{method}' in quantization_config), which is not supported"
    )


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "mamba"])
def test_weights_that_are_cut_off_are_found(model_type, spoil) -> None:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    assert "is damaged or not a safetensors file" in spoil(cut, model_type)


def test_tensors_that_do_not_fit_and_weights_that_are_not_there_are_found(
    checkpoint: Checkpoint, spoil, tmp_path: Path
) -> None:
    assert "wrong shape: " in spoil(edit_config(intermediate_size=90))
    without = tmp_path / "without"
    without.mkdir()
    shutil.copy(checkpoint("qwen2") / "config.json", without)
    with pytest.raises(ConfigError, match="has no weights: no file "):
        check_model(config_of(without))


def test_weights_that_do_not_fit_into_memory_are_refused(spoil) -> None:
    edit = edit_config(hidden_size=2**16, intermediate_size=2**22, head_dim=10)
    message = spoil(edit, load_format="dummy")
    assert re.fullmatch(
        r"the weights take [\d,]{13,} bytes but only [\d,]+ of cpu are free", message
    )


def test_what_is_no_terminal_gets_a_line_for_each_figure_however_long(
    checkpoint: Checkpoint,
) -> None:
    shown = CliRunner().invoke(main, ["check", str(checkpoint("mamba")), "--device", "cpu"])
    lines = shown.output.splitlines()
    assert lines == [line.rstrip() for line in lines]
    native = "'mamba' is of no native family"
    assert lines[1] == (
        f"served     static: {native}; MambaForCausalLM has 3 layers, none of which calls the "
        "attention interface: something else mixes tokens"
    )
    assert (
        "off: requests that join at every step  who comes later waits until the batch has ended"
        in lines
    )


def test_the_command_prints_a_table_or_json_and_fails_with_the_reason(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    command = ["check", str(checkpoint("gpt2")), "--device", "cpu", "--num-kv-blocks", "20"]
    command += ["--max-model-len", "100"]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^weights +\d+,\d+ bytes ", shown.output, re.MULTILINE)
    assert re.search(r"^off: LoRA +adapters take the native decoder$", shown.output, re.MULTILINE)
    values = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert (values["tier"], values["memory"]["num_blocks"]) == ("transformers", 20)
    assert values["memory"]["num_sequences"] == 20 // 7
    failed = CliRunner().invoke(main, ["check", str(tmp_path / "absent")])
    assert (failed.exit_code, failed.output.startswith("Error: model ")) == (1, True)


def test_adapters_of_a_list_are_read_and_their_bytes_told(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    module = "base_model.model.model.layers.1.mlp.down_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 106)}
    tensors[f"{module}.lora_B.weight"] = torch.ones(60, 2)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "exclude_modules": ["x"]}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    listed = tmp_path / "multi_lora.json"
    listed.write_text(json.dumps({"legal": "."}))
    command = ["check", str(checkpoint("llama")), "--device", "cpu", "--num-kv-blocks", "20"]
    command += ["--enable-lora", "true", "--multi-lora", str(listed)]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    line = f"adapter legal +{2 * (106 + 60) * 4:,} bytes *$"
    assert re.search(f"^{line}", shown.output, re.MULTILINE), shown.output
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tmp_path, spoilt)
    tensors[f"{module}.lora_B.weight"][1, 1] = math.nan
    save_file(tensors, spoilt / "adapter_model.safetensors")
    listed.write_text(json.dumps({"first": "spoilt", "legal": ".", "last": "spoilt"}))
    failed = CliRunner().invoke(main, command)
    assert failed.exit_code == 1
    assert re.search(f"^{line}", failed.stdout, re.MULTILINE), failed.stdout
    for name in ("first", "last"):
        refused = f"^adapter {name} +refused: .* has NaN or infinity in model"
        assert re.search(refused, failed.stdout, re.MULTILINE), failed.stdout
    assert failed.stderr == "Error: adapters are refused: first, last\n"
