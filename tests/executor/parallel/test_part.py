"""A rank's part of a model does on staged inputs, behind the host's back, what it does at once."""

from __future__ import annotations

import pytest
import torch

from octavo.config import EngineConfig
from octavo.executor.parallel.part import Blocks, Part
from octavo.executor.parallel.step_message import StepTeller
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import WHOLE
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence

CPU = torch.device("cpu")


@pytest.fixture
def make_part(checkpoints):
    """Make the only part of a tiny model."""
    options = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "cpu_threads": 1}
    config = EngineConfig(str(checkpoints["llama"]), device="cpu", **options)

    def make(**makers):
        groups = ProcessGroups(WHOLE, CPU, Rendezvous(torch.distributed.HashStore(), "", 1.0))
        part = Part(config, WHOLE, groups, CPU, lambda arrival: None, **makers)
        part.allocate(Blocks(8, 0))
        return part

    return make


def messages():
    """Return the messages of a prompt in two chunks and a decode step, and of another prompt."""
    teller = StepTeller(8, 8)
    first, second = (
        Sequence(Request(name, tuple(range(start, start + 12)), SamplingParams()))
        for name, start in (("a", 5), ("b", 40))
    )
    first.block_table, second.block_table = [3, 0], [1, 6]
    for first_count, second_count in ((7, 0), (5, 9), (1, 3)):
        shares = [(first, first_count), (second, second_count)]
        items = [ScheduledSequence(s, count, (s,)) for s, count in shares if count]
        yield teller.tell(SchedulerOutput(tuple(items)))
        for sequence, count in shares:
            sequence.num_computed_tokens += count
        if first.num_computed_tokens == 12:
            first.append_token(9)


def logits_of(part, message):
    computed = part.compute(message)
    return part.model.decoder.project(computed.states, computed.logits_rows)


def test_staged_inputs_change_nothing(make_part, staged_inputs):
    at_once = make_part()
    staged = make_part(make_inputs=lambda _, sizes: staged_inputs(sizes))
    for message in messages():
        expected = logits_of(at_once, message)
        assert torch.equal(logits_of(staged, message), expected)
