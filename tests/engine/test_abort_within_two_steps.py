"""A request that is ended from outside has given its blocks back two engine steps later."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.engine_messages import Abort, EngineReady, Shutdown
from octavo.engine_process import run_engine
from octavo.request import FinishReason, StepOutput


class SteppedRunner:
    """A model whose every step waits for the test's leave."""

    vocab_size = 1024
    eos_token_ids = ()
    max_model_len = 4096
    num_blocks = 64

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)

    def execute(self, output):
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        return torch.zeros(len(output.sampling), self.vocab_size)


@pytest.mark.parametrize(
    ("state", "prompt_of_victim"), [("running", 8), ("half-prefilled", 600), ("waiting", 8)]
)
def test_blocks_of_an_aborted_request_are_back_within_two_steps(
    state, prompt_of_victim, make_request
):
    runner = SteppedRunner()
    config = EngineConfig(
        model="none", max_num_seqs=1 if state == "waiting" else 2, max_num_batched_tokens=32
    )
    ours, theirs = Pipe()
    thread = threading.Thread(
        target=run_engine, args=(config, theirs, lambda _: Engine(config, runner))
    )
    thread.start()
    assert isinstance(ours.recv(), EngineReady)
    assert ours.recv().outputs == (), "an idle engine tells its figures"
    ours.send(make_request("other", 8, max_tokens=1000))

    def step() -> StepOutput:
        runner.leave.release()
        assert ours.poll(30)
        output = ours.recv()
        assert runner.entered.acquire(timeout=30)
        return output

    assert runner.entered.acquire(timeout=30)
    ours.send(make_request("victim", prompt_of_victim, max_tokens=1000))
    step()
    before = step().stats
    assert before.num_running + before.num_waiting == 2
    ours.send(Abort("victim", FinishReason.ABORT))
    step()
    after = step()
    assert (after.stats.num_running, after.stats.num_waiting) == (1, 0)
    assert after.stats.num_blocks - after.stats.num_free_blocks == 1
    assert [output.request_id for output in after.outputs] == ["other"]
    ours.send(Shutdown())
    runner.leave.release(10)
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    theirs.close()
