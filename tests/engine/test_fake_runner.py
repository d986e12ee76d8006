"""The engine's own promises, over a runner that answers from the token ids alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import EngineDead, InvalidRequest, PromptTooLong, QueueFull
from octavo.request import EngineInfo, FinishReason, SequenceTiming, StepStats, TokenOutput
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts

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
    num_host_blocks = 6
    window = None
    costs = PreemptionCosts(1, 1.0, math.inf, 1.0)
    steps_ahead = 0

    def __init__(self) -> None:
        self._arrived: list[int] = []

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        self._arrived += [swap_in.transfer_id for swap_in in output.copies.swap_in]
        rows = [next_token(sequence.token_ids) for sequence in output.sampling]
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits[range(len(rows)), rows] = 9.0
        return logits

    def arrived(self) -> tuple[int, ...]:
        arrived, self._arrived = tuple(self._arrived), []
        return arrived


@pytest.fixture
def make_engine():
    """Make an engine over the fake runner: 12 blocks of 8 tokens, and time stands still."""

    def make(runner: FakeRunner | None = None, **options) -> Engine:
        values = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
        return Engine(EngineConfig("fake", **values), runner or FakeRunner(), clock=lambda: 0.0)

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
        max_num_seqs=4,
        num_host_blocks=6,
    )


def test_each_step_puts_out_one_token_and_the_last_says_why(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=3))
    one, two, three = continue_by_hand(list(range(10, 15)), 3)
    assert engine.step().outputs == (TokenOutput("a", (one,)),)
    assert engine.step().outputs == (TokenOutput("a", (two,)),)
    last = TokenOutput("a", (three,), (), FinishReason.LENGTH, timing=SequenceTiming())
    assert engine.step().outputs == (last,)
    assert not engine.has_unfinished


def test_the_figures_of_each_step_are_exact(make_engine, make_request):
    engine = make_engine()
    idle = StepStats(num_blocks=12, num_free_blocks=12, num_host_blocks=6)
    assert engine.stats() == idle
    engine.add(make_request("a", 5, max_tokens=2))
    engine.add(make_request("b", 20, max_tokens=1))
    assert engine.stats() == replace(idle, num_waiting=2)
    first = replace(
        idle,
        step=1,
        num_running=2,
        num_free_blocks=9,
        num_scheduled_tokens=16,
        num_computed_tokens_total=16,
        num_generated_tokens_total=1,
        num_prefix_query_tokens_total=25,
    )
    assert engine.step().stats == first
    second = replace(
        first,
        step=2,
        num_running=0,
        num_free_blocks=12,
        num_cached_blocks=2,
        num_scheduled_tokens=10,
        num_computed_tokens_total=26,
        num_generated_tokens_total=3,
    )
    assert engine.step().stats == second
    assert engine.stats() == replace(second, num_scheduled_tokens=0)


def test_a_request_of_several_answers_counts_as_one(make_engine, make_request):
    engine = make_engine(preemption_mode="swap", enable_prefix_caching=False)
    engine.add(make_request("a", 12, n=3, temperature=6.0, seed=3, max_tokens=20))
    one_waits, three_run = engine.stats(), engine.step().stats
    for sequence in engine.scheduler.running[:0:-1]:
        engine.scheduler.preempt(sequence, now_s=0.0)
    one_runs, coming = engine.stats(), engine.step().stats
    queues = [
        (stats.num_running, stats.num_waiting, stats.num_swapped)
        for stats in (one_waits, three_run, one_runs, coming)
    ]
    assert queues == [(0, 1, 0), (1, 0, 0), (1, 1, 1), (1, 0, 1)]


def test_a_swap_is_counted_while_it_lasts(make_engine, make_request):
    engine = make_engine(preemption_mode="swap", enable_prefix_caching=False)
    engine.add(make_request("a", 12, max_tokens=20))
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0], now_s=0.0)
    out, coming, back = engine.stats(), engine.step().stats, engine.step().stats
    assert out.num_preemptions_total == out.num_swap_preemptions_total == 1
    for stats, counts in ((out, (0, 1, 1, 2)), (coming, (0, 0, 1, 2)), (back, (1, 0, 0, 0))):
        queues = (stats.num_running, stats.num_waiting, stats.num_swapped)
        assert (*queues, stats.num_used_host_blocks) == counts
    assert (out.num_free_blocks, coming.num_free_blocks) == (12, 10)
    assert (coming.num_scheduled_tokens, back.num_scheduled_tokens) == (0, 1)


def test_n_answers_are_told_apart_and_end_on_their_own(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", 5, n=3, temperature=6.0, seed=3, max_tokens=9))
    outputs = list(engine.step().outputs)
    (ended,) = engine.abort("a", index=1)
    assert ended.index == 1
    outputs += run(engine)["a"]
    answers = [[each for each in outputs if each.index == index] for index in range(3)]
    assert [len(answer) for answer in answers] == [9, 1, 9]
    assert {answer[-1].finish_reason for answer in answers} == {None, FinishReason.LENGTH}
    assert [each.token_ids for each in answers[0]] != [each.token_ids for each in answers[2]]


def test_a_deadline_ends_every_answer_with_what_it_has(make_request):
    times_s = iter(range(1000))
    engine = Engine(EngineConfig("fake", block_size=8), FakeRunner(), lambda: next(times_s))
    engine.add(make_request("a", 5, n=2, temperature=0, deadline_s=10.0))
    engine.add(make_request("b", 5, temperature=0, max_tokens=6))
    outputs = [output for _ in range(6) for output in engine.step().outputs]
    ends = [(each.request_id, each.index, each.token_ids) for each in outputs if each.finish_reason]
    assert ends[:2] == [("a", 0, ()), ("a", 1, ())]
    assert outputs.index(next(each for each in outputs if each.finish_reason)) == 9
    assert [each.request_id for each in outputs[11:]] == ["b", "b", "b"]
    assert engine.stats().num_free_blocks == 12


def test_a_full_queue_refuses_and_counts(make_engine, make_request):
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
    engine.add(make_request("a", 5))
    engine.step()
    engine.add(make_request("b", 5))
    with pytest.raises(QueueFull, match="max_num_queued_requests is 1"):
        engine.add(make_request("c", 5))
    assert engine.stats().num_requests_refused_total == 1
    assert engine.abort("c") == ()


class AheadRunner(FakeRunner):
    """A fake runner on a device that computes behind the host's back."""

    steps_ahead = 1

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[set[str]] = []
        """Whose last token each step's launch did not know yet."""

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        self.pending.append({s.request_id for s in output.sampling if s.num_pending_tokens})
        return super().execute(output, drawn)


def test_a_step_waits_for_tokens_only_if_one_that_it_drew_must_be_known(make_engine, make_request):
    runner = AheadRunner()
    engine = make_engine(runner)
    engine.add(make_request("plain", 2, temperature=0, max_tokens=9))
    assert [len(engine.step().outputs) for _ in range(3)] == [0, 1, 1]
    engine.add(make_request("reads", 2, temperature=0, max_tokens=2))
    next(iter(engine.scheduler.waiting)).needs_names = True
    assert [len(engine.step().outputs) for _ in range(2)] == [3, 2]
    assert [len(engine.step().outputs) for _ in range(2)] == [0, 1]
    assert runner.pending == [set(), {"plain"}, {"plain"}, {"plain"}, set(), set(), {"plain"}]


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

    crowded = make_engine(enable_prefix_caching=False)
    names = list("01234567")
    for name in names:
        crowded.add(request(name))
    together = run(crowded)
    assert crowded.stats().num_preemptions_total > 0
    for name in names:
        alone = make_engine(max_num_batched_tokens=4)
        alone.add(request(name))
        answers = [run(alone)[name], together[name]]
        tokens = [[output.token_ids for output in answer] for answer in answers]
        assert tokens[0] == tokens[1]


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
    assert outputs["stops"][-1].token_ids == (second,)
    assert outputs["stops"][-1].finish_reason is FinishReason.STOP
    assert len(outputs["stops"]) == 2
    assert third not in (first, second)
    (later,) = outputs["later"]
    assert later.token_ids != (first,)
    assert later.finish_reason is FinishReason.LENGTH


def test_a_token_that_the_model_does_not_have_is_refused(make_engine, make_request):
    engine = make_engine()
    message = r"^logit_bias has 97 but token ids are 0 to 96$"
    with pytest.raises(InvalidRequest, match=message):
        engine.add(make_request("a", 5, logit_bias={"97": 1}))
    assert not engine.has_unfinished


@pytest.mark.parametrize("runner", [FakeRunner, AheadRunner])
def test_rules_of_tokens_hold_in_the_engine_and_end_only_their_own_request(
    make_engine, make_request, run, runner
):
    one, two, three = continue_by_hand([5, 6], 3)
    engine = make_engine(runner())
    asks = {
        "plain": {},
        "banned": {"bad_words_token_ids": ((6, one),)},
        "stuck": {"allowed_token_ids": [one, two], "bad_words_token_ids": ((one, two), (one, one))},
        "frequent": {"frequency_penalty": 2.0, "logit_bias": {90: 10.0}},
    }
    for name, values in asks.items():
        engine.add(make_request(name, [5, 6], temperature=0, max_tokens=3, **values))
    outputs = run(engine)
    tokens = {name: [i for o in outputs[name] for i in o.token_ids] for name in asks}
    assert tokens["plain"] == [one, two, three]
    assert tokens["banned"][0] != one
    assert tokens["stuck"] == [one]
    assert outputs["stuck"][-1].finish_reason is FinishReason.ERROR
    assert str(outputs["stuck"][-1].error).startswith("no token can be drawn: allowed_token_ids")
    assert tokens["frequent"][0] == 90
    assert 90 not in tokens["frequent"][1:]


def test_log_probabilities_come_with_their_tokens_when_asked(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=2, logprobs=0))
    engine.add(make_request("b", 5, temperature=0, max_tokens=2))
    outputs = run(engine)
    best = pytest.approx(9.0 - math.log(math.exp(9.0) + VOCAB_SIZE - 1), rel=1e-4)
    for output in outputs["a"]:
        assert output.logprobs == (((output.token_ids[0], best, 1),),)
    assert [output.logprobs for output in outputs["b"]] == [(), ()]


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_frees_the_blocks_and_outputs_nothing_more(make_engine, make_request, num_steps):
    engine = make_engine()
    engine.add(make_request("other", 3, temperature=0, max_tokens=12))
    engine.add(make_request("a", 40))
    outputs = [output for _ in range(num_steps) for output in engine.step().outputs]
    assert engine.abort("a") == (
        TokenOutput("a", (), (), FinishReason.ABORT, timing=SequenceTiming()),
    )
    assert engine.abort("a") == ()
    engine.check_integrity()
    while engine.has_unfinished:
        after = engine.step()
        assert {output.request_id for output in after.outputs} == {"other"}
        outputs += after.outputs
    others = [i for o in outputs if o.request_id == "other" for i in o.token_ids]
    assert others == continue_by_hand([10, 11, 12], 12)
    assert engine.stats().num_free_blocks == 12


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_answers_for_every_answer_forked_or_not(make_engine, make_request, num_steps):
    engine = make_engine()
    engine.add(make_request("a", [5, 9, 2], n=3, max_tokens=9))
    for _ in range(num_steps):
        engine.step()
    ended = engine.abort("a")
    assert [(each.index, each.finish_reason) for each in ended] == [
        (index, FinishReason.ABORT) for index in range(3)
    ]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


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


def test_an_engine_whose_step_failed_with_copies_refuses_to_go_on(make_engine, make_request, run):
    class FailingRunner(FakeRunner):
        def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
            if output.copies:
                raise RuntimeError("the device is gone")
            return super().execute(output, drawn)

    engine = make_engine(FailingRunner(), preemption_mode="swap", enable_prefix_caching=False)
    for name in "ab":
        engine.add(make_request(name, 30, temperature=0, max_tokens=30))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(engine)
    with pytest.raises(EngineDead, match=r"^an earlier step failed while it copied blocks;"):
        engine.step()
