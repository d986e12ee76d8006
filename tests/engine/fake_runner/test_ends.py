"""How requests end in the engine, or are refused, and that others do not notice."""

from __future__ import annotations

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import EngineDead, EngineError, InvalidRequest, PromptTooLong, QueueFull
from octavo.request import FinishReason, SequenceTiming, TokenOutput
from octavo.scheduler.output import SchedulerOutput


def test_a_deadline_ends_every_answer_with_what_it_has(make_request, fake_runner):
    times_s = [0.0]
    engine = Engine(EngineConfig("fake", block_size=8), fake_runner(), lambda: times_s[-1])
    engine.add(make_request("a", 5, n=2, temperature=0, deadline_s=3.0))
    engine.add(make_request("b", 5, temperature=0, max_tokens=6))
    outputs = []
    for step in range(6):
        times_s.append(float(step))
        outputs += engine.step().outputs
    ends = [(each.request_id, each.index, each.token_ids) for each in outputs if each.finish_reason]
    assert ends[:2] == [("a", 0, ()), ("a", 1, ())]
    assert outputs.index(next(each for each in outputs if each.finish_reason)) == 9
    assert [each.request_id for each in outputs[11:]] == ["b", "b", "b"]
    assert engine.stats().num_free_blocks == 12


def test_a_deadline_that_passes_as_the_last_one_running_stops_is_told(
    make_engine, make_request, ahead_runner, continue_by_hand
):
    now_s = 0.0
    engine = make_engine(ahead_runner(), lambda: now_s, max_num_seqs=1)
    (last,) = continue_by_hand([5, 6], 1)
    engine.add(make_request("stops", [5, 6], temperature=0, stop_token_ids=(last,)))
    engine.add(make_request("waits", 5, deadline_s=3.0))
    assert engine.step().outputs == ()
    now_s = 4.0
    ends = []
    while engine.has_unfinished:
        ends += [(each.request_id, each.finish_reason) for each in engine.step().outputs]
    assert ends == [("stops", FinishReason.STOP), ("waits", FinishReason.DEADLINE)]


def test_a_full_queue_refuses_and_counts(make_engine, make_request):
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
    engine.add(make_request("a", 5))
    engine.step()
    engine.add(make_request("b", 5))
    with pytest.raises(QueueFull, match="max_num_queued_requests is 1"):
        engine.add(make_request("c", 5))
    assert engine.stats().num_requests_refused_total == 1
    assert engine.abort("c") == ()


def test_a_stop_token_ends_and_min_tokens_holds_it_off(
    make_engine, make_request, run, continue_by_hand
):
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


@pytest.mark.parametrize("runner", ["fake_runner", "ahead_runner"])
def test_rules_of_tokens_hold_in_the_engine_and_end_only_their_own_request(
    make_engine, make_request, run, runner, request, continue_by_hand
):
    one, two, three = continue_by_hand([5, 6], 3)
    engine = make_engine(request.getfixturevalue(runner)())
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


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_frees_the_blocks_and_outputs_nothing_more(
    make_engine, make_request, num_steps, continue_by_hand
):
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


@pytest.mark.parametrize("token_id", [-1, 97, 2**31])
def test_a_prompt_id_outside_the_vocabulary_is_refused(make_engine, make_request, token_id):
    engine = make_engine()
    message = rf"^the prompt holds token id {token_id} but ids must be in \[0, 96\]$"
    with pytest.raises(InvalidRequest, match=message):
        engine.add(make_request("a", [1, token_id, 2]))
    assert not engine.has_unfinished


def test_a_refused_request_disturbs_nobody(make_engine, make_request, run, continue_by_hand):
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


def test_an_engine_whose_step_failed_with_copies_refuses_to_go_on(
    make_engine, make_request, run, fake_runner
):
    class FailingRunner(fake_runner):
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


def test_a_step_that_another_process_keeps_from_ending_gives_no_token(
    make_engine, make_request, fake_runner
):
    class LostRunner(fake_runner):
        def finish(self) -> None:
            self.is_queued = True

        def wait(self) -> None:
            assert self.is_queued
            raise EngineError("rank 1 died")

    engine = make_engine(LostRunner())
    engine.add(make_request("a", 5, temperature=0, max_tokens=3))
    with pytest.raises(EngineError, match=r"^rank 1 died$"):
        engine.step()
