"""An engine whose decode steps are replayed, one step behind the host, answers as without."""

from __future__ import annotations

import logging

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.executor.device_tools import DeviceTools
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence

OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "num_kv_blocks": 24}


@pytest.fixture
def graph_runner(make_runner, graph_tools):
    return make_runner(make_tools=graph_tools, **OPTIONS)


def make_requests() -> list[Request]:
    """Make more requests than there are seats; some prompts take several steps."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.7, "top_k": 9, "min_tokens": 4},
    ]
    return [
        Request(
            str(index),
            tuple((13 * index + 5 * i) % 97 for i in range(2 + 7 * index % 40)),
            SamplingParams(
                seed=index,
                max_tokens=3 + 2 * index,
                logprobs=3,
                prompt_logprobs=2 if index % 3 else None,
                **kinds[index % 4],
            ),
        )
        for index in range(10)
    ]


def answer(runner, **options) -> dict[tuple[str, int], list[tuple]]:
    """Run all requests; return what is told of the prompts, and of the tokens of each answer."""
    engine = Engine(EngineConfig("model", block_size=8, **OPTIONS, **options), runner)
    for request in make_requests():
        engine.add(request)
    answers: dict[tuple[str, int], list[tuple]] = {}
    while engine.has_unfinished:
        for output in engine.step().outputs:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            told = answers.setdefault((output.request_id, output.index), [])
            told += [*output.prompt_logprobs, *pairs]
    engine.check_integrity()
    return answers


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_answers_the_same_to_the_bit(make_runner, graph_runner, fake_recorder, mode):
    before = fake_recorder.num_replays
    assert graph_runner.steps_ahead == 1
    answers = answer(graph_runner, preemption_mode=mode)
    assert len(answers) == 14
    assert answers == answer(make_runner(**OPTIONS), preemption_mode=mode)
    assert fake_recorder.num_replays > before + 10


def make_step(*shares: tuple[int, int, int]) -> SchedulerOutput:
    """Make a step from (tokens computed, tokens to compute, draws) of each sequence."""
    scheduled = []
    for index, (num_computed, num_scheduled, num_draws) in enumerate(shares):
        sequence = Sequence(
            Request(str(index), (1,) * (num_computed + num_scheduled), SamplingParams())
        )
        sequence.num_computed_tokens = num_computed
        sequence.block_table = [2 * index, 2 * index + 1]
        scheduled.append(ScheduledSequence(sequence, num_scheduled, (sequence,) * num_draws))
    return SchedulerOutput(tuple(scheduled))


def test_only_steps_of_decoding_sequences_alone_are_replayed(graph_runner, fake_recorder):
    def num_replays(*shares: tuple[int, int, int]) -> int:
        before = fake_recorder.num_replays
        num_rows = sum(num_draws for _, _, num_draws in shares)
        assert graph_runner.execute(make_step(*shares), None).shape == (num_rows, 97)
        return fake_recorder.num_replays - before

    assert num_replays((0, 3, 1)) == 0
    assert num_replays((0, 3, 1), (4, 1, 1)) == 0
    assert num_replays((0, 3, 3)) == 0
    assert num_replays((3, 1, 2), (4, 1, 1)) == 0
    assert num_replays((3, 1, 0)) == 0
    assert num_replays((3, 1, 1)) == 1
    assert num_replays((3, 1, 1), (4, 1, 1), (0, 1, 1)) == 1
    assert num_replays(*[(3, 1, 1)] * 6) == 1


def test_a_step_with_an_adapter_is_not_replayed(graph_runner, fake_recorder):
    step, before = make_step((3, 1, 1), (4, 1, 1)), fake_recorder.num_replays
    step.scheduled[1].sequence.lora_slot = 0
    assert graph_runner.execute(step, None).shape == (2, 97)
    assert fake_recorder.num_replays == before


def test_every_size_is_recorded_at_load_and_those_that_only_tell_memory_before(
    graph_runner, fake_recorder
):
    num_rows = [capture.num_rows for capture in fake_recorder.captures]
    assert num_rows == [6, 4, 6, 4, 2, 1]


def test_the_cache_holds_nothing_when_the_model_is_ready(graph_runner):
    assert not graph_runner._kv_cache.storage.any()


def test_the_log_tells_what_was_chosen(make_runner, graph_tools, caplog):
    caplog.set_level(logging.INFO)
    runner = make_runner(make_tools=graph_tools, **OPTIONS)
    name = runner._decoder.attention.name
    ready = caplog.messages[-1].partition(" s: ")
    assert ready[0].startswith("model ready in ")
    assert ready[2] == f"LlamaForCausalLM on cpu, attention {name}, 4 decode graphs, 24 KV blocks"


def test_too_little_memory_for_graphs_is_told(make_runner, staged_inputs):
    class FullDevice:
        num_records = 0

        def record(self, sizes) -> None:
            self.num_records += 1
            if self.num_records > 2:
                raise torch.OutOfMemoryError("out of memory")

    graphs = FullDevice()

    def make_tools(device, attention, sizes):
        return DeviceTools(1, staged_inputs(sizes), lambda decoder, kv_cache: graphs)

    with pytest.raises(ConfigError, match="a KV cache of 24 blocks leaves too little GPU memory"):
        make_runner(make_tools=make_tools, **OPTIONS)
