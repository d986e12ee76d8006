"""Each rank has a GPU that Ray reserves for it alone. Ray only pretends that there are any."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch

from octavo.errors import ConfigError, EngineError
from octavo.executor.parallel import rank_zero
from octavo.executor.parallel.rank_messages import Assignment
from octavo.executor.parallel.ray_launcher import RayLauncher
from octavo.executor.parallel.workers import Workers

TOLD = re.compile(r"rank (\d) on (\S+): computes on GPU (\d) of this node, here (cuda:\d)")


@pytest.fixture
def make_gpu_options(ray_gpu_nodes, make_options, monkeypatch):
    """Make the options of an engine over the cluster, for a process that sees one GPU more."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,7,5")
    return lambda **options: make_options(
        device="cuda",
        distributed_executor_backend="ray",
        ray_address=ray_gpu_nodes.address,
        **options,
    )


@pytest.fixture
def start(request):
    """Start the other ranks of an engine, as rank zero does."""

    def start(config, **launcher_options):
        workers = Workers(RayLauncher(config, **launcher_options))
        request.addfinalizer(workers.end)
        ranks = range(1, config.num_ranks)
        workers.start([Assignment(config, rank, "cuda", workers.host, 1, 1, 5.0) for rank in ranks])
        return workers

    return start


@pytest.fixture
def told(caplog):
    """Wait for what so many ranks tell of their GPUs; return it, in order of rank."""
    caplog.set_level(logging.INFO)

    def wait(num_ranks):
        deadline_s, found = time.monotonic() + 60.0, []
        while len(found) < num_ranks:
            assert time.monotonic() < deadline_s, caplog.text
            time.sleep(0.02)
            texts = [record.getMessage() for record in caplog.records]
            found = sorted(match.groups() for match in map(TOLD.fullmatch, texts) if match)
        return found

    return wait


def test_no_two_ranks_have_the_same_gpu(make_gpu_options, start, told):
    workers = start(make_gpu_options(pipeline_parallel_size=3))
    (own, other), numbers = ("7", "5"), ("cuda:1", "cuda:2")
    if workers.own_device == numbers[1]:
        own, other = other, own
    assert workers.own_device == dict(zip("75", numbers, strict=True))[own]
    places = {(host, gpu, device) for _, host, gpu, device in told(2)}
    assert places == {("127.0.0.2", other, "cuda:0"), ("127.0.0.3", "3", "cuda:0")}


def test_rank_zero_computes_on_the_gpu_that_is_reserved_for_it(make_gpu_options, told, monkeypatch):
    taken, others = [], []

    def take(device):
        taken.append(device)
        others.extend(told(1))
        raise EngineError("there is none in truth")

    devices = (torch.device("cuda"),) * 2
    monkeypatch.setattr(rank_zero, "rank_devices", lambda config: devices)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    with pytest.raises(EngineError, match="in truth"):
        rank_zero.RankZero(make_gpu_options(tensor_parallel_size=2))
    ((_, host, gpu, _),) = others
    assert host == "127.0.0.2", "a tensor group is on one node where that has the GPUs"
    assert taken == [torch.device("cuda", {"5": 1, "7": 2}[gpu])]


def test_a_reserved_gpu_that_rank_zero_does_not_see_is_told_of(
    make_gpu_options, start, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"^Ray has reserved GPU '[57]' but CUDA_VISIBLE_DEVICES"):
        start(make_gpu_options(tensor_parallel_size=2))


def test_gpus_that_the_cluster_lacks_are_told_of(make_gpu_options, start):
    with pytest.raises(EngineError) as error:
        start(make_gpu_options(tensor_parallel_size=4), place_timeout_s=0.2)
    assert re.fullmatch(
        r"the Ray cluster at 127\.0\.0\.2:\d+ has no room for 4 ranks within 0\.2 s: asked for are "
        r"1 CPU and 1 GPU on the node of rank 0, 3 times 1 CPU and 1 GPU; it has "
        r"127\.0\.0\.2 with 2 CPUs and 2 GPUs, 127\.0\.0\.3 with 1 CPU and 1 GPU; "
        r"free are \d CPUs? and \d GPUs?",
        str(error.value),
    )
