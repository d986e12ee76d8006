"""A model's configuration: completed from three lines, checked, and refused with a reason."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import LaunchError
from octavo.local.server_command import GPU_DRIVER
from octavo.local.triton_server import TritonServer
from octavo_client import Client, codec

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
WriteModel = Callable[..., Path]

THREE_LINES = """\
backend: "octavo"
max_batch_size: 0
instance_group [ { kind: KIND_CPU } ]
"""
INPUTS = {
    "text_input": ("TYPE_STRING", ["1"]),
    "input_ids": ("TYPE_INT32", ["-1"]),
    "messages": ("TYPE_STRING", ["1"]),
    "stream": ("TYPE_BOOL", ["1"]),
    "sampling_parameters": ("TYPE_STRING", ["1"]),
    "exclude_input_in_output": ("TYPE_BOOL", ["1"]),
    "return_finish_reason": ("TYPE_BOOL", ["1"]),
    "return_cumulative_logprob": ("TYPE_BOOL", ["1"]),
    "return_logprobs": ("TYPE_BOOL", ["1"]),
    "return_num_input_tokens": ("TYPE_BOOL", ["1"]),
    "return_num_output_tokens": ("TYPE_BOOL", ["1"]),
    "return_token_ids": ("TYPE_BOOL", ["1"]),
    "return_timing": ("TYPE_BOOL", ["1"]),
    "return_prompt_logprobs": ("TYPE_BOOL", ["1"]),
}
OUTPUTS = {
    "text_output": ("TYPE_STRING", ["-1"]),
    "finish_reason": ("TYPE_STRING", ["-1"]),
    "cumulative_logprob": ("TYPE_FP32", ["-1"]),
    "logprobs": ("TYPE_STRING", ["-1"]),
    "token_ids": ("TYPE_INT32", ["-1"]),
    "num_input_tokens": ("TYPE_UINT32", ["1"]),
    "num_output_tokens": ("TYPE_UINT32", ["-1"]),
    "timing": ("TYPE_STRING", ["1"]),
    "prompt_logprobs": ("TYPE_STRING", ["1"]),
}


@pytest.fixture
def write_model(tmp_path: Path, tiny_checkpoint: Path) -> WriteModel:
    """Return a function that writes a repository of one model from its two files."""

    def write(config: str = THREE_LINES, **options: Any) -> Path:
        version = tmp_path / "models" / "octavo" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        frugal = {"cpu_threads": 1, "num_kv_blocks": 100}
        options = {"model": str(tiny_checkpoint), **frugal, **options}
        (version / "engine.json").write_text(json.dumps(options))
        return version.parents[1]

    return write


@pytest.fixture
def load_failure(start_server: StartServer) -> Callable[[Path], str]:
    """Return a function that starts a server whose model must not load, and gives the reason."""

    def start(repository: Path) -> str:
        with pytest.raises(LaunchError) as caught:
            start_server(repository=repository)
        return str(caught.value)

    return start


def config_of(server: TritonServer) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.http_url}/v2/models/octavo/config") as answer:
        return dict(json.load(answer))


def tensors(entries: list[dict[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    return {e["name"]: (e["data_type"], [str(size) for size in e["dims"]]) for e in entries}


def test_three_lines_of_config_serve_every_tensor(
    start_server: StartServer, write_model: WriteModel
) -> None:
    server = start_server(repository=write_model())
    config = config_of(server)
    assert tensors(config["input"]) == INPUTS
    assert all(entry["optional"] for entry in config["input"])
    assert tensors(config["output"]) == OUTPUTS
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    with Client(server.grpc_url, timeout_s=60) as client:
        assert client.generate("a", max_tokens=3, ignore_eos=True).num_output_tokens == 3


def test_python_backend_serves_the_same_class_from_a_model_file(
    start_server: StartServer, write_model: WriteModel
) -> None:
    repository = write_model(THREE_LINES.replace("octavo", "python"))
    source = "from octavo.triton_model.model import TritonPythonModel as TritonPythonModel\n"
    (repository / "octavo" / "1" / "model.py").write_text(source)
    server = start_server(repository=repository)
    assert tensors(config_of(server)["output"]) == OUTPUTS
    with Client(server.grpc_url, timeout_s=60) as client:
        assert client.generate("a", max_tokens=3, ignore_eos=True).num_output_tokens == 3


def test_client_sends_tensors_that_the_model_has() -> None:
    forms = {"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"input_ids": [1]}
    sent = [codec.encode_request("m", codec.Prompt(**form), True, {}).inputs for form in forms]
    assert {tensor.name for inputs in sent for tensor in inputs} <= set(INPUTS)
    numpy_names = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "INT32": "TYPE_INT32"}
    types = {tensor.name: numpy_names[tensor.datatype] for inputs in sent for tensor in inputs}
    assert types == {name: INPUTS[name][0] for name in types}


def test_parameters_of_config_override_engine_json_and_the_environment_both(
    start_server: StartServer, write_model: WriteModel
) -> None:
    parameter = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
    config = THREE_LINES + parameter.format("default_max_tokens", 4)
    config += parameter.format("num_kv_blocks", 50)
    repository = write_model(config, default_max_tokens=2, num_kv_blocks=30, max_model_len=99)
    environment = {"OCTAVO_NUM_KV_BLOCKS": "3"}
    server = start_server(repository=repository, environment=environment)
    with Client(server.grpc_url, timeout_s=60) as client:
        assert client.generate("a", ignore_eos=True).num_output_tokens == 4
        longest = client.generate(input_ids=[5] * 40, max_tokens=99, ignore_eos=True)
    assert longest.num_output_tokens == 3 * 16 - 40


def test_unknown_option_fails_the_load_and_names_the_nearest(
    load_failure: Callable[[Path], str], write_model: WriteModel
) -> None:
    reason = load_failure(write_model(num_kv_block=9))
    assert "unknown engine option 'num_kv_block'; did you mean 'num_kv_blocks'?" in reason
    assert "Traceback" not in reason


def test_wrong_tenant_weights_fail_the_load(
    load_failure: Callable[[Path], str], write_model: WriteModel
) -> None:
    reason = load_failure(write_model(scheduling_policy="fair", tenant_weights="gold=0"))
    assert "option tenant_weights" in reason
    assert "tenant 'gold' the weight '0'" in reason


def test_missing_checkpoint_fails_the_load_and_names_it(
    load_failure: Callable[[Path], str], write_model: WriteModel
) -> None:
    assert "/nonesuch" in load_failure(write_model(model="/nonesuch"))


def test_option_that_contradicts_the_instance_group_fails_the_load(
    load_failure: Callable[[Path], str], write_model: WriteModel
) -> None:
    reason = load_failure(write_model(device="cuda"))
    assert "option device is 'cuda' but the instance_group is of KIND_CPU" in reason


def test_tensor_of_another_type_in_config_fails_the_load(
    load_failure: Callable[[Path], str], write_model: WriteModel
) -> None:
    tensor = 'input [ { name: "stream" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    assert "stream" in load_failure(write_model(THREE_LINES + tensor))


@pytest.mark.skipif(GPU_DRIVER.exists(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("instances", "device", "reason"),
    [
        ("kind: KIND_GPU", "auto", "has kind KIND_GPU but no GPUs are available"),
        ("kind: KIND_GPU gpus: [ 0 ]", "auto", "invalid or unsupported gpu id 0"),
        ("kind: KIND_MODEL", "cuda", "option device is 'cuda' but this machine has 0 CUDA devices"),
    ],
)
def test_gpu_that_is_not_there_fails_the_load(
    load_failure: Callable[[Path], str],
    write_model: WriteModel,
    instances: str,
    device: str,
    reason: str,
) -> None:
    config = THREE_LINES.replace("kind: KIND_CPU", instances)
    assert reason in load_failure(write_model(config, device=device))
