"""A request that is ended has given its blocks back two engine steps later, whatever its state."""

from __future__ import annotations

import math
import threading
from multiprocessing import Pipe
from types import MappingProxyType

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.engine_messages import Abort, EngineReady, Shutdown
from octavo.engine_process import run_engine
from octavo.request import FinishReason, Request, StepOutput
from octavo.scheduler.preemption import PreemptionCosts

ABORT, DEADLINE = FinishReason.ABORT, FinishReason.DEADLINE

#: By state of the victim: who else runs, and (running, waiting, swapped) before it is ended.
STATES = {
    "waiting": (["other", "pusher"], (2, 1, 0)),
    "half-prefilled": (["other"], (2, 0, 0)),
    "running": (["other"], (2, 0, 0)),
    "swapped": (["other", "pusher"], (2, 1, 1)),
    "restoring": (["other"], (1, 0, 1)),
}


class SteppedRunner:
    """A model whose every step waits for the test's leave, and whose swap-ins take two steps."""

    vocab_size = 1024
    eos_token_ids = ()
    max_model_len = 4096
    num_blocks = 64
    num_host_blocks = 8
    window = None
    adapters, num_adapter_slots = MappingProxyType({}), 0
    costs = PreemptionCosts(1, 1.0, math.inf, 1.0)
    num_stages = 1
    steps_ahead = 0
    computes_on_host = True
    connections = ()

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self._under_way: list[tuple[int, ...]] = [(), ()]

    def execute(self, output, drawn):
        self._under_way.append(tuple(each.transfer_id for each in output.copies.swap_in))
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        return torch.zeros(len(output.sampling), self.vocab_size)

    def finish(self):
        """Do nothing more."""

    def wait(self):
        """Wait for no other process."""

    def arrived_adapters(self, timeout_s):
        return ()

    def arrived(self):
        return self._under_way.pop(0)

    def check_processes(self):
        """Do nothing: there are none."""


class SteppedEngine:
    """The loop around an engine, in a thread, one step at a time; `now_s` is its clock."""

    def __init__(self) -> None:
        config = EngineConfig(
            model="none",
            max_num_seqs=2,
            max_num_batched_tokens=32,
            scheduling_policy="priority",
            preemption_mode="swap",
        )
        self.now_s = 0.0
        self._runner = SteppedRunner()
        self._ours, self._theirs = Pipe()
        self._thread = threading.Thread(target=run_engine, args=(config, self._theirs, self._make))
        self._thread.start()
        assert isinstance(self._ours.recv(), EngineReady)
        assert self._ours.recv().outputs == (), "an idle engine tells its figures"

    def begin(self, request: Request) -> None:
        """Send the first request, and wait until its first step has begun."""
        self.send(request)
        assert self._runner.entered.acquire(timeout=30)

    def send(self, message: Request | Abort) -> None:
        """Send what is read before the next step begins."""
        self._ours.send(message)

    def step(self) -> StepOutput:
        """Let the step end that has begun, and wait until the next one has begun."""
        self._runner.leave.release()
        assert self._ours.poll(30)
        output = self._ours.recv()
        assert self._runner.entered.acquire(timeout=30)
        return output

    def stop(self) -> None:
        self.send(Shutdown())
        self._runner.leave.release(10)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._ours.close()
        self._theirs.close()

    def _make(self, config: EngineConfig) -> Engine:
        return Engine(config, self._runner, clock=lambda: self.now_s)


@pytest.fixture
def engine():
    stepped = SteppedEngine()
    yield stepped
    stepped.stop()


@pytest.mark.parametrize("reason", [ABORT, DEADLINE])
@pytest.mark.parametrize("state", STATES)
def test_blocks_of_an_ended_request_are_back_within_two_steps(engine, make_request, state, reason):
    others, before = STATES[state]
    prompt = 600 if state == "half-prefilled" else 8
    pusher = make_request("pusher", 3)
    engine.begin(make_request("other", 3))
    if state == "waiting":
        engine.send(pusher)
    engine.send(make_request("victim", prompt, priority=1, deadline_s=100.0))
    engine.step()
    if state in ("swapped", "restoring"):
        engine.step()
        engine.send(pusher)
        engine.step()
    if state == "restoring":
        engine.send(Abort("pusher", ABORT))
        engine.step()
    stats = engine.step().stats
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == before

    if reason is ABORT:
        engine.send(Abort("victim", ABORT))
    else:
        engine.now_s = 100.0
    engine.step()
    after = engine.step()
    stats = after.stats
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (len(others), 0, 0)
    assert stats.num_blocks - stats.num_free_blocks == len(others)
    assert stats.num_used_host_blocks == 0
    ends = [(each.request_id, each.finish_reason) for each in after.outputs]
    told = [("victim", DEADLINE)] if reason is DEADLINE else []
    assert ends == [*told, *((name, None) for name in others)]
