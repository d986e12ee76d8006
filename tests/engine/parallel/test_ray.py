"""Ranks on two nodes of a Ray cluster: the tokens of one rank, and each failure named."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from octavo.engine_host import HUGE_PAGES, EngineProcess
from octavo.engine_messages import EngineFailed, EngineReady
from octavo.errors import ConfigError, EngineError
from octavo.executor.parallel.fingerprint import fingerprint
from octavo.executor.parallel.rank_messages import Assignment, Found
from octavo.executor.parallel.rank_zero import RankZero
from octavo.executor.parallel.ray_launcher import RayLauncher
from octavo.executor.parallel.workers import Workers
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
LONG = replace(GREEDY, max_tokens=200)
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
NAMES = {
    "tensor": "rank 1 (tensor part 1 of 2, stage 0 of 1) on 127.0.0.3",
    "pipeline": "rank 1 (tensor part 0 of 1, stage 0 of 2) on 127.0.0.3",
}


@pytest.fixture(scope="module")
def make_ray_options(ray_nodes, make_options):
    """Make the options of an engine over the cluster."""
    return lambda **options: make_options(
        device="cpu",
        distributed_executor_backend="ray",
        ray_address=ray_nodes.address,
        **{"step_timeout_s": 4.0, **options},
    )


@pytest.fixture(params=[TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def runner(request, make_ray_options, caplog) -> Iterator[RankZero]:
    caplog.set_level(logging.INFO)
    runner = RankZero(make_ray_options(**request.param))
    yield runner
    runner.close()


def test_two_nodes_answer_as_one_rank(
    request, runner, one_rank, drive, make_options, make_prompts, caplog
):
    assert runner.worker_names == (NAMES[request.node.callspec.id],)
    logged = [record.getMessage() for record in caplog.get_records("setup")]
    assert "rank 1 on 127.0.0.3: KV cache: 256 blocks of 16 tokens, 1 MiB on cpu" in logged
    drivers = [drive(make_options(), each, 256, 64) for each in (runner, one_rank)]
    for driver in drivers:
        prompts = make_prompts([3, 17, 40, 95, 9])
        driver.add_all([(prompt, GREEDY) for prompt in prompts])
        driver.run()
    ours, theirs = drivers
    assert ours.outputs.keys() == theirs.outputs.keys()
    for name, index in ours.outputs:
        assert ours.tokens(name, index) == theirs.tokens(name, index)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not (came := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return came


def is_gone(pids: tuple[int, ...]) -> bool:
    """Tell whether neither a rank nor the process that speaks with Ray is there any more."""
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    return not any(map(psutil.pid_exists, pids)) and not any("ray_driver" in c for c in commands)


@pytest.fixture
def failing(make_ray_options) -> Iterator[RankZero]:
    """Give a runner on two nodes one rank of which is to fail; nothing of it is left."""
    runner = RankZero(make_ray_options(**TENSOR))
    pids = runner.worker_pids
    yield runner
    runner.close()
    assert wait_until(lambda: is_gone(pids))


def test_a_rank_that_dies_is_named_in_time_where_the_cluster_does_not_say_how(
    failing, drive, make_options, make_prompts
):
    (bridge,) = [
        child for child in psutil.Process().children() if "ray_driver" in " ".join(child.cmdline())
    ]
    driver = drive(make_options(), failing, failing.num_blocks, failing.num_host_blocks)
    driver.add_all([(prompt, LONG) for prompt in make_prompts([20])])
    driver.step()
    bridge.suspend()
    os.kill(failing.worker_pids[0], signal.SIGKILL)
    # Of 4 s in which the engine may be silent.
    how = re.escape(f"{NAMES['tensor']} is gone: the Ray cluster does not answer for 3 s")
    with pytest.raises(EngineError, match=f"^{how}$"):
        driver.run()


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, r"^{name} died: its worker process has died"),
        (signal.SIGSTOP, r"^no answer from {name}: rank 0 .* lost rank 1 "),
    ],
)
def test_a_step_says_which_rank_on_which_node_failed(
    failing, drive, make_options, make_prompts, number, how
):
    driver = drive(make_options(), failing, failing.num_blocks, failing.num_host_blocks)
    driver.add_all([(prompt, LONG) for prompt in make_prompts([20, 30])])
    for _ in range(5):
        driver.step()
    (pid,) = failing.worker_pids
    driver.runner.after_execute = lambda output: os.kill(pid, number)
    with pytest.raises(EngineError, match=how.format(name=re.escape(NAMES["tensor"]))):
        driver.run()


def test_a_lost_node_is_named_and_another_one_takes_its_place(
    ray_nodes, failing, drive, make_options, make_ray_options, make_prompts
):
    driver = drive(make_options(), failing, failing.num_blocks, failing.num_host_blocks)
    driver.add_all([(prompt, LONG) for prompt in make_prompts([20, 30])])
    for _ in range(5):
        driver.step()
    ray_nodes.lose()
    with pytest.raises(EngineError, match=rf"^{re.escape(NAMES['tensor'])} is lost with its node"):
        driver.run()
    failing.close()
    ray_nodes.restore()  # it takes a while to join
    again = RankZero(make_ray_options(**TENSOR))
    assert again.worker_names == (NAMES["tensor"],)
    again.close()


@pytest.fixture
def engine_process(make_ray_options):
    """Give a started engine process over two nodes, and its other rank."""
    host = EngineProcess(make_ray_options(**PIPELINE))
    assert isinstance(host.connection.recv(), EngineReady)
    (rank,) = [each for each in psutil.process_iter(["cmdline"]) if is_rank(each)]
    yield host, rank
    host.stop(0.0)


def is_rank(process: psutil.Process) -> bool:
    return "ray::RayRank" in " ".join(process.info["cmdline"] or [])


def test_the_owner_of_an_idle_engine_hears_which_rank_died(engine_process):
    host, rank = engine_process
    rank.kill()
    while not isinstance(message := host.connection.recv(), EngineFailed):
        pass
    assert message.message.startswith(f"{NAMES['pipeline']} died: its worker process has died")
    host.stop(10.0)
    assert host.describe_end() == "engine process ended (exit status 1)"


def test_no_rank_outlives_the_engine(engine_process):
    host, rank = engine_process
    os.kill(host.pid, signal.SIGKILL)
    host.stop(5.0)
    assert wait_until(lambda: not psutil.pid_exists(rank.pid))


def test_a_node_has_the_huge_pages_and_finds_the_hub_checkpoint_of_rank_zero(
    make_ray_options, checkpoints, tmp_path, monkeypatch
):
    folder = tmp_path / "models--tests--tiny"
    shutil.copytree(checkpoints["llama"], folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("GLIBC_TUNABLES", HUGE_PAGES[0])
    config = replace(make_ray_options(**TENSOR), model="tests/tiny")
    workers = Workers(RayLauncher(config))
    workers.start([Assignment(config, 1, "cpu", workers.host, 1, 1, 5.0)])
    expected = Found(fingerprint(checkpoints["llama"], {}))
    assert workers.hear(Found, 60.0) == [(NAMES["tensor"], expected)]
    started_with = psutil.Process(*workers.pids).environ()
    assert started_with["GLIBC_TUNABLES"] == HUGE_PAGES[0]
    workers.end()


def test_a_rank_that_does_not_reach_rank_zero_is_named(make_ray_options):
    config = make_ray_options(**TENSOR)
    launcher = RayLauncher(config)
    launcher._listener.address = (launcher.host, 1)
    workers = Workers(launcher)
    how = rf"^{re.escape(NAMES['tensor'])} died: .* Connection refused, before it reached rank 0$"
    with pytest.raises(EngineError, match=how):
        workers.start([Assignment(config, 1, "cpu", workers.host, 1, 1, 5.0)])
    workers.end()


def test_what_was_asked_for_and_what_there_is_are_said_where_there_is_no_room(make_ray_options):
    config = make_ray_options(tensor_parallel_size=3)
    workers = Workers(RayLauncher(config, place_timeout_s=0.2))
    with pytest.raises(EngineError) as error:
        workers.start([Assignment(config, rank, "cpu", workers.host, 1, 1, 5.0) for rank in (1, 2)])
    workers.end()
    assert re.fullmatch(
        r"the Ray cluster at 127\.0\.0\.2:\d+ has no room for 3 ranks within 0\.2 s: asked for are "
        r"1 CPU and 0 GPUs on the node of rank 0, 2 times 1 CPU and 0 GPUs; it has "
        r"127\.0\.0\.2 with 1 CPU and 0 GPUs, 127\.0\.0\.3 with 1 CPU and 0 GPUs; "
        r"free are \d CPUs? and 0 GPUs",
        str(error.value),
    )


@pytest.mark.parametrize(("host", "reason"), [("127.0.0.2", "refused"), ("a" * 64, "too long")])
def test_a_cluster_that_is_not_there_is_said_at_once(make_options, host, reason):
    ray = {"distributed_executor_backend": "ray", "ray_address": f"{host}:1", "device": "cpu"}
    config = make_options(**TENSOR, **ray)
    with pytest.raises(EngineError, match=f"^no Ray cluster is reached at {host}:1: .* {reason}"):
        RayLauncher(config)


def test_without_ray_it_is_said_how_to_install_it(make_options, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"'ray' but Ray is not installed; install it with `pip"):
        RayLauncher(make_options(**TENSOR))
