"""A rank that fails is named, whatever others notice of it, and nothing is left of any rank."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.engine_host import EngineProcess
from octavo.engine_messages import EngineFailed, EngineReady
from octavo.errors import ConfigError, EngineError
from octavo.executor.parallel.fingerprint import fingerprint
from octavo.executor.parallel.mp_launcher import MpLauncher
from octavo.executor.parallel.rank_messages import Assignment, Found
from octavo.executor.parallel.rank_zero import RankZero
from octavo.executor.parallel.workers import Workers
from octavo.request import Request, StepOutput
from octavo.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, seed=0)
GRIDS = {
    "tensor": ({"tensor_parallel_size": 2}, 1, r"rank 1 \(tensor part 1 of 2, stage 0 of 1\)"),
    "pipeline": ({"pipeline_parallel_size": 3}, 2, r"rank 2 \(tensor part 0 of 1, stage 0 of 3\)"),
}


@pytest.fixture(params=GRIDS)
def failing(request, make_options):
    """Give a runner over some ranks, the process of the one that is to fail, and its name."""
    options, rank, name = GRIDS[request.param]
    # Also the limit of the ranks' first meeting, which takes a while on a busy machine.
    runner = RankZero(make_options(step_timeout_s=6.0, **options))
    pids = runner.worker_pids
    yield runner, pids[rank - 1], name
    runner.close()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, r"^{name} died \(signal 9, SIGKILL\)$"),
        (signal.SIGSTOP, r"^no answer from {name}: rank 0 .* lost rank 1 "),
    ],
)
def test_a_step_says_which_rank_failed(failing, drive, make_options, make_prompts, number, how):
    runner, pid, name = failing
    driver = drive(make_options(), runner, runner.num_blocks, runner.num_host_blocks)
    driver.add_all([(prompt, PARAMS) for prompt in make_prompts([20, 30, 40])])
    for _ in range(5):
        driver.step()
    driver.runner.after_execute = lambda output: os.kill(pid, number)
    with pytest.raises(EngineError, match=how.format(name=name)):
        driver.run()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_cannot_be_divided_is_refused_before_ranks_or_devices_are_counted(
    make_options, device
):
    children = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"^option tensor_parallel_size is 5 but must be at most"):
        RankZero(make_options(tensor_parallel_size=5, device=device))
    assert psutil.Process().children() == children


def start_worker(config: EngineConfig) -> Workers:
    workers = Workers(MpLauncher(2))
    workers.start([Assignment(config, 1, "cpu", workers.host, 1, 1, 5.0)])
    return workers


def test_a_rank_that_does_not_find_the_checkpoint_is_named(make_options, tmp_path):
    config = replace(make_options(tensor_parallel_size=2), model=str(tmp_path / "gone"))
    workers = start_worker(config)
    with pytest.raises(ConfigError, match=r"^rank 1 \(.*\) failed to load: model '.*' does not ex"):
        workers.hear(Found, 60.0)
    workers.end()


def test_a_rank_that_dies_while_it_loads_is_named(make_options):
    workers = start_worker(make_options(tensor_parallel_size=2))
    os.kill(workers.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"^rank 1 \(.*\) died \(signal 9, SIGKILL\) while it l"):
        workers.hear(Found, 60.0)
    workers.end()


def test_a_rank_that_hangs_while_it_loads_is_named(make_options):
    workers = start_worker(make_options(tensor_parallel_size=2))
    (pid,) = workers.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"^no answer from rank 1 \(.*\) for 1 s while it load"):
        workers.hear(Found, 1.0)
    workers.end()
    assert not psutil.pid_exists(pid)


def test_checkpoints_of_other_settings_or_sizes_differ(checkpoints, tmp_path):
    own = fingerprint(checkpoints["llama"], {})
    assert own == fingerprint(checkpoints["llama"], {})
    assert own != fingerprint(checkpoints["qwen2"], {})
    (tmp_path / "config.json").write_bytes((checkpoints["llama"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0")
    assert own != fingerprint(tmp_path, {})


def test_what_is_no_file_of_a_checkpoint_or_adapter_is_not_compared(checkpoints, tmp_path):
    for name in ("checkpoint", "adapter"):
        (tmp_path / name).mkdir()
    config = (checkpoints["llama"] / "config.json").read_bytes()
    (tmp_path / "checkpoint" / "config.json").write_bytes(config)
    before = fingerprint(tmp_path / "checkpoint", {"a": tmp_path / "adapter"})
    for name in ("checkpoint", "adapter"):
        (tmp_path / name / "pytorch_model.bin").symlink_to("deleted")
        (tmp_path / name / "old.json").mkdir()
    assert fingerprint(tmp_path / "checkpoint", {"a": tmp_path / "adapter"}) == before


def test_adapters_of_other_names_order_or_sizes_differ(checkpoints, tmp_path):
    for name, size in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(bytes(size))
    a, b, c = (tmp_path / name for name in "abc")
    lists = [{}, {"x": a, "y": b}, {"y": a, "x": b}, {"x": a, "y": c}, {"x": a}]
    assert len({fingerprint(checkpoints["llama"], each) for each in lists}) == 5
    assert fingerprint(checkpoints["llama"], {"x": a}) == fingerprint(
        checkpoints["llama"], {"x": b}
    )


@pytest.fixture
def engine_process(make_options):
    """Give a started engine process on two ranks, and its other rank."""
    host = EngineProcess(make_options(tensor_parallel_size=2))
    assert isinstance(host.connection.recv(), EngineReady)
    (worker,) = psutil.Process(host.pid).children()
    yield host, worker
    host.stop(0.0)


def test_the_owner_of_the_engine_hears_which_rank_died(engine_process):
    host, worker = engine_process
    host.connection.send(Request("a", tuple(range(10, 40)), PARAMS))
    host.connection.recv()
    worker.kill()
    while not isinstance(message := host.connection.recv(), EngineFailed):
        pass
    assert message.message == ("rank 1 (tensor part 1 of 2, stage 0 of 1) died (signal 9, SIGKILL)")
    host.stop(10.0)
    assert host.describe_end() == "engine process ended (exit status 1)"


def test_the_owner_of_an_idle_engine_hears_at_once_which_rank_died(engine_process):
    host, worker = engine_process
    assert isinstance(host.connection.recv(), StepOutput), "an idle engine tells its figures"
    worker.kill()
    assert host.connection.poll(5.0)
    assert host.connection.recv() == EngineFailed(
        "rank 1 (tensor part 1 of 2, stage 0 of 1) died (signal 9, SIGKILL)"
    )
    host.stop(10.0)


def test_no_rank_outlives_the_engine(engine_process):
    host, worker = engine_process
    os.kill(host.pid, signal.SIGKILL)
    host.stop(5.0)
    deadline_s = time.monotonic() + 5.0
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "a rank outlives the engine"
        time.sleep(0.01)
