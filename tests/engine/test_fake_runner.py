"""The engine's own promises, over a runner that answers from the token ids alone."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import InvalidRequest, PromptTooLong
from octavo.request import EngineInfo, FinishReason, StepStats, TokenOutput
from octavo.scheduler.output import SchedulerOutput

VOCAB_SIZE = 97


def next_token(token_ids: list[int]) -> int:
    """Return what the fake model says next; never its end-of-text id, 0."""
    return 1 + (31 * token_ids[-1] + 7 * len(token_ids)) % (VOCAB_SIZE - 1)


def continue_by_hand(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeRunner:
    """A model whose logits point at `next_token`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (0,)
    max_model_len = 64
    num_blocks = 12

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        rows = [next_token(sequence.token_ids) for sequence in output.sampling]
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits[range(len(rows)), rows] = 9.0
        return logits


@pytest.fixture
def make_engine():
    """Make an engine over the fake runner: 12 blocks of 8 tokens."""

    def make(**options) -> Engine:
        values = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
        return Engine(EngineConfig("fake", **values), FakeRunner())

    return make


@pytest.fixture
def run():
    """Run an engine to the end, recounting after each step; return outputs by request."""

    def run_engine(engine: Engine) -> dict[str, list[TokenOutput]]:
        outputs: dict[str, list[TokenOutput]] = {}
        while engine.has_unfinished:
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
        return outputs

    return run_engine


def test_the_engine_says_what_it_is(make_engine):
    assert make_engine(default_max_tokens=33).info == EngineInfo(
        max_model_len=64,
        num_blocks=12,
        block_size=8,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        default_max_tokens=33,
    )


def test_each_step_puts_out_one_token_and_the_last_says_why(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=3))
    one, two, three = continue_by_hand(list(range(10, 15)), 3)
    assert engine.step().outputs == (TokenOutput("a", (one,)),)
    assert engine.step().outputs == (TokenOutput("a", (two,)),)
    assert engine.step().outputs == (TokenOutput("a", (three,), (), FinishReason.LENGTH),)
    assert not engine.has_unfinished


def test_the_figures_of_each_step_are_exact(make_engine, make_request):
    engine = make_engine()
    assert engine.stats() == StepStats(num_blocks=12, num_free_blocks=12)
    engine.add(make_request("a", 5, max_tokens=2))
    engine.add(make_request("b", 20, max_tokens=1))
    assert engine.stats().num_waiting == 2
    assert engine.step().stats == StepStats(1, 2, 0, 12, 9, 16, 16, 1, 0)
    assert engine.step().stats == StepStats(2, 0, 0, 12, 12, 10, 26, 3, 0)
    assert engine.stats() == StepStats(2, 0, 0, 12, 12, 0, 26, 3, 0)


def test_many_requests_get_exactly_their_tokens_through_preemption(make_engine, make_request, run):
    engine = make_engine()
    prompts = {str(i): [(i * 7 + j) % VOCAB_SIZE for j in range(3 + 5 * i)] for i in range(9)}
    lengths = {name: 20 + 2 * int(name) for name in prompts}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, temperature=0, max_tokens=lengths[name]))
    outputs = run(engine)
    for name, prompt in prompts.items():
        room = 64 - len(prompt)
        expected = continue_by_hand(prompt, min(lengths[name], room))
        assert [i for output in outputs[name] for i in output.token_ids] == expected
        reasons = [output.finish_reason for output in outputs[name]]
        assert reasons == [None] * (len(expected) - 1) + [FinishReason.LENGTH]
    stats = engine.stats()
    assert stats.num_preemptions_total > 0
    assert stats.num_free_blocks == stats.num_blocks == 12
    assert stats.num_generated_tokens_total == sum(map(len, outputs.values()))


def test_random_draws_do_not_depend_on_neighbours_or_preemption(make_engine, make_request, run):
    def request(name):
        return make_request(name, 9, temperature=6.0, seed=int(name), max_tokens=25)

    crowded = make_engine()
    names = list("01234567")
    for name in names:
        crowded.add(request(name))
    together = run(crowded)
    assert crowded.stats().num_preemptions_total > 0
    for name in names:
        alone = make_engine(max_num_batched_tokens=4)
        alone.add(request(name))
        assert run(alone)[name] == together[name]


def test_a_stop_token_ends_and_min_tokens_holds_it_off(make_engine, make_request, run):
    first, second, third = continue_by_hand([5, 6], 3)
    engine = make_engine()
    engine.add(make_request("stops", [5, 6], temperature=0, stop_token_ids=(second,)))
    engine.add(
        make_request(
            "later", [5, 6], temperature=0, stop_token_ids=(first,), min_tokens=1, max_tokens=1
        )
    )
    outputs = run(engine)
    assert outputs["stops"][-1] == TokenOutput("stops", (second,), (), FinishReason.STOP)
    assert len(outputs["stops"]) == 2
    assert third not in (first, second)
    (later,) = outputs["later"]
    assert later.token_ids != (first,)
    assert later.finish_reason is FinishReason.LENGTH


def test_log_probabilities_come_with_their_tokens_when_asked(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=2, return_logprob=True))
    engine.add(make_request("b", 5, temperature=0, max_tokens=2))
    outputs = run(engine)
    best = pytest.approx(9.0 - math.log(math.exp(9.0) + VOCAB_SIZE - 1), rel=1e-4)
    assert [output.logprobs for output in outputs["a"]] == [(best,), (best,)]
    assert [output.logprobs for output in outputs["b"]] == [(), ()]


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_frees_the_blocks_and_outputs_nothing_more(make_engine, make_request, num_steps):
    engine = make_engine()
    engine.add(make_request("other", 3, temperature=0, max_tokens=12))
    engine.add(make_request("a", 40))
    outputs = [output for _ in range(num_steps) for output in engine.step().outputs]
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.check_integrity()
    while engine.has_unfinished:
        after = engine.step()
        assert {output.request_id for output in after.outputs} == {"other"}
        outputs += after.outputs
    others = [i for o in outputs if o.request_id == "other" for i in o.token_ids]
    assert others == continue_by_hand([10, 11, 12], 12)
    assert engine.stats().num_free_blocks == 12


def test_abort_of_an_unknown_request_says_so(make_engine):
    assert not make_engine().abort("never")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31])
def test_a_prompt_id_outside_the_vocabulary_is_refused(make_engine, make_request, token_id):
    engine = make_engine()
    message = rf"^the prompt holds token id {token_id} but ids must be in \[0, 96\]$"
    with pytest.raises(InvalidRequest, match=message):
        engine.add(make_request("a", [1, token_id, 2]))
    assert not engine.has_unfinished


def test_a_refused_request_disturbs_nobody(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=2))
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.add(make_request("a", 3))
    with pytest.raises(PromptTooLong, match=r"^prompt has 64 tokens but one sequence can hold 64"):
        engine.add(make_request("b", 64))
    with pytest.raises(InvalidRequest, match="0 tokens"):
        engine.add(make_request("c", 0))
    outputs = run(engine)
    assert list(outputs) == ["a"]
    assert [o.token_ids[0] for o in outputs["a"]] == continue_by_hand(list(range(10, 15)), 2)
