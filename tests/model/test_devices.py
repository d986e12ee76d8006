"""Each rank has a device of its own, or the load is refused by name."""

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.devices import device_of_gpu, rank_devices, use_device

RAY = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


def devices_of(count, **options):
    config = EngineConfig("demo", **options)
    return list(map(str, rank_devices(config, count_devices=lambda: count)))


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (0, {}, ["cpu"]),
        (2, {}, ["cuda:0"]),
        (2, {"device": "cpu", "tensor_parallel_size": 2}, ["cpu", "cpu"]),
        (0, {"tensor_parallel_size": 2}, ["cpu", "cpu"]),
        (2, {"device": "cuda"}, ["cuda:0"]),
        (2, {"device": "cuda:1"}, ["cuda:1"]),
        (2, {"devices": "1"}, ["cuda:1"]),
        (8, {"tensor_parallel_size": 2}, ["cuda:0", "cuda:1"]),
        (
            4,
            {"device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        ),
        (8, {"devices": "6,2", "pipeline_parallel_size": 2}, ["cuda:6", "cuda:2"]),
        (1, {"device": "cuda", **RAY}, ["cuda", "cuda"]),  # which, Ray says
        (1, RAY, ["cuda", "cuda"]),
        (0, RAY, ["cpu", "cpu"]),
        (1, {"device": "cpu", **RAY}, ["cpu", "cpu"]),
        (2, {"devices": "1", "distributed_executor_backend": "ray"}, ["cuda:1"]),  # alone
    ],
)
def test_ranks_have_the_devices_that_are_named_or_the_first_ones(count, options, expected):
    assert devices_of(count, **options) == expected


@pytest.mark.parametrize(
    ("count", "options", "asked"),
    [
        (0, {"device": "cuda"}, "option device is 'cuda'"),
        (2, {"device": "cuda:2"}, "option device is 'cuda:2'"),
        (0, {"device": "cuda", **RAY}, "option device is 'cuda'"),
        (0, {"devices": "0"}, "option devices is '0'"),
        (4, {"devices": "0,4", "tensor_parallel_size": 2}, "option devices is '0,4'"),
        (
            1,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "tensor_parallel_size times pipeline_parallel_size is 4",
        ),
    ],
)
def test_devices_that_the_machine_lacks_are_told_of(count, options, asked, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError) as error:
        devices_of(count, **options)
    assert str(error.value) == f"{asked} but this machine has {count} CUDA devices"


def test_a_variable_that_hides_devices_is_told_of(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"has 1 CUDA devices \(CUDA_VISIBLE_DEVICES is '3'\)$"):
        devices_of(1, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("gpu", "visible", "expected"),
    [("2", None, "cuda:2"), ("2", "5, 2", "cuda:1"), ("GPU-8f", "GPU-8f,GPU-1c", "cuda:0")],
)
def test_a_gpu_of_rays_is_found_by_its_name(gpu, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert str(device_of_gpu(gpu, environment)) == expected


@pytest.mark.parametrize(
    ("gpu", "environment", "shown"),
    [
        ("2", {"CUDA_VISIBLE_DEVICES": "0,1"}, "'0,1'"),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, "''"),
        ("GPU-8f", {}, "not set"),
    ],
)
def test_a_gpu_of_rays_that_is_hidden_is_told_of(gpu, environment, shown):
    with pytest.raises(ConfigError) as error:
        device_of_gpu(gpu, environment)
    assert str(error.value) == (
        f"Ray has reserved GPU {gpu!r} but CUDA_VISIBLE_DEVICES of this process is {shown}; "
        "start Ray on this node and the server with the same"
    )


def test_a_thread_takes_a_cuda_device_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    use_device(torch.device("cpu"))
    use_device(torch.device("cuda", 3))
    assert taken == [torch.device("cuda", 3)]
