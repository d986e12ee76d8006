"""What the engine's steps put out and count, over a runner that answers from token ids alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from octavo.request import EngineInfo, FinishReason, SequenceTiming, StepStats, TokenOutput

#: Of the fake runner.
VOCAB_SIZE = 97


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
        computes_on_host=True,
    )


def test_each_step_puts_out_one_token_and_the_last_says_why(
    make_engine, make_request, continue_by_hand
):
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
        num_context=2,
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
        num_context=1,
        num_computed_tokens_total=26,
        num_generated_tokens_total=3,
    )
    assert engine.step().stats == second
    assert engine.stats() == replace(second, num_scheduled_tokens=0, num_context=0)


def test_a_step_says_how_long_it_took_and_idle_figures_do_not(make_engine, make_request):
    ticks = itertools.count()
    engine = make_engine(clock=lambda: float(next(ticks)))
    engine.add(make_request("a", 5, max_tokens=2))
    assert engine.stats().step_s == 0.0
    started_s = next(ticks)
    step_s = engine.step().stats.step_s
    assert 0.0 < step_s == next(ticks) - started_s - 2.0, "between its first and last look"
    assert engine.stats().step_s == 0.0


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


def test_a_step_waits_for_tokens_only_if_one_that_it_drew_must_be_known(
    make_engine, make_request, ahead_runner
):
    runner = ahead_runner()
    engine = make_engine(runner)
    engine.add(make_request("plain", 2, temperature=0, max_tokens=9))
    assert [len(engine.step().outputs) for _ in range(3)] == [0, 1, 1]
    engine.add(make_request("reads", 2, temperature=0, max_tokens=2))
    next(iter(engine.scheduler.waiting)).needs_names = True
    assert [len(engine.step().outputs) for _ in range(2)] == [3, 2]
    assert [len(engine.step().outputs) for _ in range(2)] == [0, 1]
    assert runner.pending == [set(), {"plain"}, {"plain"}, {"plain"}, set(), set(), {"plain"}]


def test_many_requests_get_exactly_their_tokens_through_preemption(
    make_engine, make_request, run, continue_by_hand
):
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


def test_log_probabilities_come_with_their_tokens_when_asked(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", 5, temperature=0, max_tokens=2, logprobs=0))
    engine.add(make_request("b", 5, temperature=0, max_tokens=2))
    outputs = run(engine)
    best = pytest.approx(9.0 - math.log(math.exp(9.0) + VOCAB_SIZE - 1), rel=1e-4)
    for output in outputs["a"]:
        assert output.logprobs == (((output.token_ids[0], best, 1),),)
    assert [output.logprobs for output in outputs["b"]] == [(), ()]
