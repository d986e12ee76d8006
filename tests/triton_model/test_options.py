from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.triton_model.options import read_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., EngineConfig]:
    """Read the options of an instance of a model whose engine.json names the model `file`."""
    version = tmp_path / "1"
    version.mkdir()
    (version / "engine.json").write_text('{"model": "file", "max_num_seqs": 3}')

    def call(
        kind: str = "MODEL", device_id: str = "0", environment: Any = None, **parameters: str
    ) -> EngineConfig:
        config = {"parameters": {k: {"string_value": v} for k, v in parameters.items()}}
        args = {
            "model_config": json.dumps(config),
            "model_instance_kind": kind,
            "model_instance_device_id": device_id,
            "model_repository": str(tmp_path),
            "model_version": "1",
        }
        return read_config(args, environment or {})

    return call


def test_parameters_override_the_file_and_the_environment_overrides_both(
    read: Callable[..., EngineConfig],
) -> None:
    assert (read().model, read().max_num_seqs) == ("file", 3)
    assert read(model="parameter").model == "parameter"
    environment = {"OCTAVO_MODEL": "variable", "OCTAVO_BLOCK_SIZE": "32"}
    config = read(model="parameter", environment=environment)
    assert (config.model, config.block_size) == ("variable", 32)


def test_parameters_of_the_python_backend_are_not_engine_options(
    read: Callable[..., EngineConfig],
) -> None:
    assert read(EXECUTION_ENV_PATH="env.tar.gz", FORCE_CPU_ONLY_INPUT_TENSORS="no").model == "file"


def test_adapters_are_listed_beside_the_file_unless_it_is_said_where(
    read: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    beside, given = read(enable_lora="true"), read(enable_lora="true", multi_lora="/other.json")
    assert (beside.multi_lora, given.multi_lora) == (f"{tmp_path}/1/multi_lora.json", "/other.json")
    assert read(multi_lora="/other.json").multi_lora is None


def test_an_unknown_parameter_fails_the_load(read: Callable[..., EngineConfig]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        read(max_num_seq="3")


@pytest.mark.parametrize(
    ("kind", "device_id", "option", "device"),
    [
        ("CPU", "0", "auto", "cpu"),
        ("CPU", "0", "cpu", "cpu"),
        ("GPU", "2", "auto", "cuda:2"),
        ("GPU", "2", "cuda", "cuda:2"),
        ("GPU", "2", "cuda:2", "cuda:2"),
        ("MODEL", "0", "auto", "auto"),
        ("MODEL", "0", "cuda:1", "cuda:1"),
    ],
)
def test_the_instance_group_decides_the_device(
    read: Callable[..., EngineConfig], kind: str, device_id: str, option: str, device: str
) -> None:
    assert read(kind, device_id, device=option).device == device


@pytest.mark.parametrize(
    ("kind", "device_id", "option", "message"),
    [
        ("CPU", "0", "cuda", "option device is 'cuda' but the instance_group is of KIND_CPU"),
        ("GPU", "0", "cuda:1", "option device is 'cuda:1' but the instance_group is of KIND_GPU"),
        ("GPU", "-1", "auto", "instance_group names GPU '-1' but must name one from 0 up"),
        ("AUTO", "0", "auto", "instance_group kind is KIND_AUTO but must be KIND_CPU, KIND_GPU"),
    ],
)
def test_a_device_that_contradicts_the_instance_group_fails_the_load(
    read: Callable[..., EngineConfig], kind: str, device_id: str, option: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(kind, device_id, device=option)


@pytest.mark.parametrize(("kind", "device"), [("CPU", "cpu"), ("GPU", "cuda:0")])
def test_an_instance_group_and_devices_do_not_both_choose(
    read: Callable[..., EngineConfig], kind: str, device: str
) -> None:
    assert read("MODEL", devices="1").devices == "1"
    message = f"^option devices is '1' but must be absent where device is {device}$"
    with pytest.raises(ConfigError, match=message):
        read(kind, "0", devices="1")


def test_several_ranks_need_an_instance_that_leaves_the_devices_to_the_engine(
    read: Callable[..., EngineConfig],
) -> None:
    assert read("MODEL", tensor_parallel_size="2", pipeline_parallel_size="3").num_ranks == 6
    message = (
        "^instance_group kind is KIND_CPU but must be KIND_MODEL where tensor_parallel_size times "
        "pipeline_parallel_size is 2$"
    )
    with pytest.raises(ConfigError, match=message):
        read("CPU", pipeline_parallel_size="2")


def test_the_repository_of_the_checkout_is_valid() -> None:
    engine_json = ROOT / "model_repository" / "octavo" / "1" / "engine.json"
    assert EngineConfig.load(engine_json, {}, {}).model == "demo"
