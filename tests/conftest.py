"""The one Hypothesis profile, and what tests of every folder make requests with."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

# Before anything imports transformers: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything imports torch: threads that wait for others sleep, as tests and servers run side
# by side, and the cores that they would spin on are wanted there.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.request import Request
from octavo.sampling_params import SamplingParams

# A shell that starts the tests in the background ignores SIGINT, and so would every process that
# they start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline: on a shared machine a slow example says nothing about the code.
settings.register_profile("octavo", deadline=None, print_blob=True)
settings.load_profile("octavo")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one of two processes the files from the first on, the other one from the last.

    So one is with the end-to-end tests, which wait much and share servers; the other computes.
    """
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            if node is not self.nodes[0]:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return FromBothEnds(config, log)


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Make a resolved request: a name, a prompt (ids, or how many), and more.

    The rest are sampling parameters, or fields of the request by their names.
    """
    own_fields = {field.name for field in fields(Request)}

    def make(name: str = "a", prompt: int | Sequence[int] = 5, **values: Any) -> Request:
        ids = range(10, 10 + prompt) if isinstance(prompt, int) else prompt
        own = {key: values.pop(key) for key in own_fields & values.keys()}
        params = SamplingParams(**{"max_tokens": 1000, "seed": 0, **values})
        return Request(name, tuple(ids), params, **own)

    return make


class DelayedTransfers:
    """Transfers whose swap-ins arrive in order, but only after `num_polls` more polls than usual.

    Until then their targets are NaN, and their sources are read only in the end: whoever reads or
    writes one of them too early spoils what is computed.
    """

    def __init__(self, attention: Any, device: Any, host: Any, num_polls: int = 1) -> None:
        # Tests of the client run where the engine's parts are not installed.
        from octavo.executor.block_transfers import DirectTransfers

        self.num_polls = num_polls
        self._device = device
        self._direct = DirectTransfers(attention, device, host)
        self._under_way: deque[SwapIn] = deque()
        self._polls_left: deque[int] = deque()

    def start(self, copies: BlockCopies) -> None:
        self._direct.start(BlockCopies(copies.swap_out, copies.copies))
        for swap_in in copies.swap_in:
            self._device.storage[[target for _, target in swap_in.pairs]] = float("nan")
            self._under_way.append(swap_in)
            self._polls_left.append(self.num_polls)

    def arrived(self) -> tuple[int, ...]:
        while self._polls_left and self._polls_left[0] <= 0:
            self._polls_left.popleft()
            self._direct.start(BlockCopies(swap_in=(self._under_way.popleft(),)))
        self._polls_left = deque(polls - 1 for polls in self._polls_left)
        return self._direct.arrived()

    def wait(self) -> None:
        if self._polls_left:
            self._polls_left[0] = 0


@pytest.fixture(scope="session")
def delayed_transfers() -> type[DelayedTransfers]:
    """Give the class, which takes the place of a runner's own transfers."""
    return DelayedTransfers


class RayNodes:
    """A Ray cluster of two nodes on this machine, each with an address of its own.

    They end with the tests, however these end.

    Args:
        own_gpus: names of as many pretended GPUs of rank zero's node, which has a CPU for each; or
            none, and one CPU.
        other_gpus: those of the other one.
    """

    own_host, other_host = "127.0.0.2", "127.0.0.3"
    #: A lost node is to be noticed in seconds.
    _SETTINGS = (
        '{"health_check_initial_delay_ms": 0, "health_check_period_ms": 500,'
        ' "health_check_failure_threshold": 2}'
    )

    def __init__(self, own_gpus: str = "", other_gpus: str = "") -> None:
        self._gpus = {self.own_host: own_gpus, self.other_host: other_gpus}
        # Not below pytest's own folder: names of sockets may not be long.
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-ray-"))
        head = ["--head", "--port=0", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        self._head = self._start(self.own_host, *head, f"--system-config={self._SETTINGS}")
        self.address = self._read_address()
        self._other = self._start(self.other_host, f"--address={self.address}")

    def lose(self) -> None:
        """Kill the raylet of the other node, and what else of it does not end by itself."""
        import psutil

        for process in psutil.Process(self._other.pid).children():
            if process.name() == "raylet":
                process.kill()
        self._end(self._other)

    def restore(self) -> None:
        """Let another node of the same address join."""
        self._other = self._start(self.other_host, f"--address={self.address}")

    def close(self) -> None:
        for node in (self._other, self._head):
            self._end(node)
        shutil.rmtree(self._folder)

    def _start(self, host: str, *arguments: str) -> subprocess.Popen[bytes]:
        script = "import os, sys; from octavo.parent_process import die_with_parent;" + (
            "die_with_parent(); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *arguments]
        num_gpus = len(list(filter(None, self._gpus[host].split(","))))
        sizes = [f"--num-cpus={num_gpus or 1}", f"--num-gpus={num_gpus}"]
        sizes.append("--object-store-memory=80000000")
        with (self._folder / f"{host}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", script, *command, f"--node-ip-address={host}", *sizes],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "CUDA_VISIBLE_DEVICES": self._gpus[host],
                },
            )

    def _read_address(self) -> str:
        path, deadline_s = self._folder / "ray_current_cluster", time.monotonic() + 60.0
        while not (path.exists() and (address := path.read_text())):
            log = (self._folder / f"{self.own_host}.log").read_text()
            assert self._head.poll() is None, log
            assert time.monotonic() < deadline_s, log
            time.sleep(0.05)
        return address

    def _end(self, node: subprocess.Popen[bytes]) -> None:
        node.kill()  # and with it all that it has started
        node.wait()


@contextmanager
def _ray_nodes(*gpus: str) -> Iterator[RayNodes]:
    # Two clusters would have the same addresses, and tests look for their ranks on all the machine.
    with (Path(tempfile.gettempdir()) / f"octavo-ray-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nodes = RayNodes(*gpus)
        try:
            yield nodes
        finally:
            nodes.close()


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    """Give a Ray cluster, which ends with the module's tests: others have the machine again."""
    with _ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def ray_gpu_nodes() -> Iterator[RayNodes]:
    """Give the same with two GPUs on rank zero's node and one on the other, all pretended."""
    with _ray_nodes("5,7", "3") as nodes:
        yield nodes
