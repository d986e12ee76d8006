"""The engine over a runner of two stages: what a step draws is known one step later."""

from __future__ import annotations

from octavo.request import TokenOutput


def test_steps_that_do_not_wait_for_each_other_change_no_token(
    make_engine, make_request, pipeline_runner, run, continue_by_hand
):
    engine = make_engine(pipeline_runner())
    prompts = {name: list(range(start, start + 9)) for start, name in enumerate("abcde", 10)}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, temperature=0, max_tokens=7))
    outputs = run(engine)
    for name, prompt in prompts.items():
        tokens = [token_id for output in outputs[name] for token_id in output.token_ids]
        assert tokens == continue_by_hand(prompt, 7)


def test_a_step_puts_out_what_the_one_before_has_drawn(
    make_engine, make_request, pipeline_runner, continue_by_hand
):
    engine = make_engine(runner := pipeline_runner())
    for name in "ab":
        engine.add(make_request(name, 5, temperature=0, max_tokens=3))
    (first,) = continue_by_hand(list(range(10, 15)), 1)
    assert engine.step().outputs == ()
    assert len(runner.started) == 1
    assert engine.step().outputs == (TokenOutput("a", (first,)),)
    assert engine.step().outputs == (TokenOutput("b", (first,)),)


def test_when_all_are_under_way_only_the_oldest_step_is_waited_for(
    make_engine, make_request, pipeline_runner, continue_by_hand
):
    runner = pipeline_runner()
    runner.num_stages = 3
    engine = make_engine(runner)
    for name in "ab":
        engine.add(make_request(name, 5, temperature=0, max_tokens=3))
    first, second, _ = continue_by_hand(list(range(10, 15)), 3)
    outputs = [engine.step().outputs for _ in range(7)]
    assert outputs == [
        (),
        (),
        (TokenOutput("a", (first,)),),
        (),
        (TokenOutput("b", (first,)),),
        (),
        (TokenOutput("a", (second,)),),
    ]


def test_what_draws_by_a_form_or_by_penalties_needs_no_step_to_wait(
    make_engine, make_request, pipeline_runner, run
):
    engines = [make_engine(runner) for runner in (None, pipeline_runner())]
    answers = []
    for engine in engines:
        for name in "abc":
            request = make_request(
                name, 4, temperature=0, max_tokens=6, repetition_penalty=5.0, presence_penalty=2.0
            )
            engine.add(request)
        outputs = run(engine)
        answers.append([[each.token_ids for each in outputs[name]] for name in "abc"])
    assert answers[0] == answers[1]


def test_steps_in_mid_flight_are_finished_though_nobody_waits(
    make_engine, make_request, pipeline_runner
):
    engine = make_engine(runner := pipeline_runner())
    engine.add(make_request("a", 5, temperature=0))
    engine.step()
    engine.abort("a")
    assert engine.has_unfinished
    assert engine.step().outputs == ()
    assert not runner.started
    assert not engine.has_unfinished
