"""The engine of the traditional mode: transformers' tokens, and what requests may ask for."""

from __future__ import annotations

import functools
import gc
import math
import random
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.config import EngineConfig
from octavo.errors import EngineError, InvalidRequest, PromptTooLong
from octavo.request import FinishReason, Request, TokenOutput
from octavo.sampling_params import SamplingParams
from octavo.static_engine.engine import StaticEngine
from octavo.static_engine.runner import StaticRunner
from octavo.static_engine.trial import BatchKind

PROMPTS = [
    [random.Random(place).randrange(8, 257) for place in range(length)]
    for length in (5, 19, 12, 5, 30)
]
VOCAB_SIZE = 257

MakeEngine = Callable[..., StaticEngine]


@pytest.fixture(scope="module")
def make_engine(checkpoint: Callable[[str], Path]) -> Iterator[MakeEngine]:
    """Return a function that loads an engine, once for the same options."""
    engines: dict[Any, StaticEngine] = {}

    def make(name: str, **options: Any) -> StaticEngine:
        key = (name, *sorted(options.items()))
        if key not in engines:
            values = {"model": str(checkpoint(name)), "cpu_threads": 1, "device": "cpu", **options}
            engines[key] = StaticEngine.load(EngineConfig.from_mapping(values))
        return engines[key]

    yield make
    for engine in engines.values():
        assert not engine.has_unfinished
        engine.check_integrity()


def make_request(engine: StaticEngine, name: str, prompt: Iterable[int], **params: Any) -> Request:
    prompt = tuple(prompt)
    info = engine.info
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 8, "seed": 1, **params})
    sampling = sampling.resolve(info.room_behind(len(prompt)), info.default_max_tokens)
    return Request(name, prompt, sampling, encodes_prompt=info.encodes_prompt)


def run(engine: StaticEngine, requests: Iterable[Request] = ()) -> dict[str, list[TokenOutput]]:
    """Run requests, or what is there, to the end; return outputs by request."""
    for request in requests:
        engine.add(request)
    outputs = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: Iterable[TokenOutput], index: int = 0) -> list[int]:
    return [id_ for output in outputs if output.index == index for id_ in output.token_ids]


def answer(engine: StaticEngine, prompt: list[int], **params: Any) -> list[int]:
    return tokens_of(run(engine, [make_request(engine, "a", prompt, **params)])["a"])


def test_a_batch_has_the_tokens_that_transformers_generates_alone(
    architecture: str, make_engine: MakeEngine, generate_alone: Callable[..., list[int]]
) -> None:
    engine = make_engine(architecture)
    lengths = range(6, 6 + len(PROMPTS))
    jobs = {str(length): job for length, job in zip(lengths, PROMPTS, strict=True)}
    outputs = run(
        engine, [make_request(engine, key, jobs[key], max_tokens=int(key)) for key in jobs]
    )
    for key, prompt in jobs.items():
        assert tokens_of(outputs[key]) == generate_alone(architecture, prompt, int(key))
        assert outputs[key][-1].finish_reason is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jamba", BatchKind.PADDED),
        ("t5", BatchKind.PADDED),
        ("bart", BatchKind.PADDED),
        ("recurrent_gemma", BatchKind.EQUAL),
        ("rwkv", BatchKind.SINGLE),
    ],
)
def test_what_a_batch_may_hold_is_found_out(
    name: str, kind: BatchKind, checkpoint: Callable[[str], Path]
) -> None:
    runner = StaticRunner(EngineConfig(str(checkpoint(name)), cpu_threads=1, device="cpu"))
    assert runner.batch_kind is kind


def test_a_prompt_of_one_token_knows_nothing_of_the_batch_before(make_engine: MakeEngine) -> None:
    """RecurrentGemma keeps its state in its modules, and takes such a prompt for a next token."""
    engine = make_engine("recurrent_gemma")
    first = answer(engine, [40])
    answer(engine, PROMPTS[1])
    assert answer(engine, [40]) == first
    longer = answer(engine, [41, 40])
    assert answer(engine, [41]) != longer
    for module in engine._static_runner._model.module.modules():
        assert getattr(module, "recurrent_states", None) is None


def test_a_model_without_rows_side_by_side_has_one_seat(make_engine: MakeEngine) -> None:
    engine = make_engine("rwkv")
    with pytest.raises(InvalidRequest, match=r"^n is 2 but max_num_seqs is 1; "):
        engine.add(make_request(engine, "a", PROMPTS[0], n=2))


def test_who_comes_first_waits_for_others_where_a_batch_can_have_them(
    make_engine: MakeEngine,
) -> None:
    assert (make_engine("mamba").company_s, make_engine("rwkv").company_s) == (0.005, 0.0)


def test_a_seed_gives_the_same_tokens_and_each_answer_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine("bloom")
    random_ones = {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "seed": 9}
    (three,) = run(engine, [make_request(engine, "a", PROMPTS[0], n=3, **random_ones)]).values()
    answers = [tokens_of(three, index) for index in range(3)]
    assert answers[0] == answer(engine, PROMPTS[0], **random_ones)
    assert len(set(map(tuple, answers))) == 3


def test_logprobs_are_of_the_tokens_and_sum_to_one(make_engine: MakeEngine) -> None:
    engine = make_engine("mamba", max_logprobs=VOCAB_SIZE)
    (outputs,) = run(engine, [make_request(engine, "a", PROMPTS[0], logprobs=VOCAB_SIZE)]).values()
    for output in outputs:
        ((own, *others),) = output.logprobs
        assert (own.token_id, own.rank) == (output.token_ids[0], 1)
        every = [own, *others]
        assert len(every) == VOCAB_SIZE
        assert sum(math.exp(each.logprob) for each in every) == pytest.approx(1.0, abs=1e-4)


def test_prompt_logprobs_are_those_of_the_same_tokens_as_an_answer(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine("deepseek_v2")
    prompt = PROMPTS[0]
    (outputs,) = run(engine, [make_request(engine, "a", prompt, logprobs=0)]).values()
    tokens = tokens_of(outputs)
    told = [output.logprobs[0][0].logprob for output in outputs]
    beside = make_request(engine, "b", PROMPTS[1])
    scored = make_request(engine, "c", [*prompt, *tokens], prompt_logprobs=0, n=2)
    outputs = run(engine, [beside, scored])["c"]
    (scores,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert len(scores) == len(prompt) + len(tokens) - 1
    assert [each[0].token_id for each in scores] == [*prompt, *tokens][1:]
    assert [each[0].logprob for each in scores][-len(tokens) :] == pytest.approx(told, abs=1e-3)


def test_rules_of_single_tokens_are_heeded(make_engine: MakeEngine) -> None:
    engine = make_engine("mpt")
    usual = answer(engine, PROMPTS[0])
    assert answer(engine, PROMPTS[0], allowed_token_ids=[40, 41, 42])[0] in (40, 41, 42)
    assert answer(engine, PROMPTS[0], logit_bias={usual[0]: -100})[0] != usual[0]
    assert len(set(answer(engine, PROMPTS[0], frequency_penalty=2.0, max_tokens=30))) > len(
        set(answer(engine, PROMPTS[0], max_tokens=30))
    )
    stopped = answer(engine, PROMPTS[0], stop_token_ids=[usual[0]])
    assert stopped == usual[:1]
    held_open = answer(engine, PROMPTS[0], stop_token_ids=[usual[0]], min_tokens=3)
    assert usual[0] not in held_open[:3]


def test_an_answer_has_the_form_that_was_asked_for(
    make_engine: MakeEngine, byte_tokenizer: Any
) -> None:
    engine = make_engine("t5")
    wanted = {"regex": "[a-c]{3}x"}
    tokens = answer(engine, PROMPTS[0], structured_outputs=wanted, max_tokens=20)
    text = byte_tokenizer.decode(tokens, skip_special_tokens=True)
    assert re.fullmatch(wanted["regex"], text)


def test_an_encoders_prompt_takes_no_room_of_the_answer(
    make_engine: MakeEngine, generate_alone: Callable[..., list[int]]
) -> None:
    """Both have 96 positions, of which the decoder's own start takes one."""
    engine = make_engine("bart")
    longest = [20 + place % 50 for place in range(96)]
    tokens = answer(engine, longest, max_tokens=None, ignore_eos=True)
    assert len(tokens) == 95
    assert tokens[:12] == generate_alone("bart", longest, 12)
    with pytest.raises(PromptTooLong, match=r"^prompt has 97 tokens but the encoder takes 96; "):
        engine.add(make_request(engine, "a", [*longest, 9]))


def test_penalties_heed_the_answer_and_not_what_an_encoder_reads(make_engine: MakeEngine) -> None:
    engine = make_engine("t5")
    usual = answer(engine, PROMPTS[0], max_tokens=1)
    prompt = [*PROMPTS[0], *usual]
    assert answer(engine, prompt, max_tokens=1, repetition_penalty=1e6) == answer(
        engine, prompt, max_tokens=1
    )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("mamba", {"beam_width": 2, "seed": None}, "^beam_width is 2 but must be 1 in the trad"),
        ("t5", {"prompt_logprobs": 0}, "^prompt_logprobs must be absent where the prompt is an "),
        ("bart", {"max_tokens": 96}, "^max_tokens is 96 but the decoder has room for 95$"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    name: str, params: dict[str, Any], message: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(name)
    sampling = SamplingParams(**{"seed": 0, "max_tokens": 1, "temperature": 0, **params})
    with pytest.raises(InvalidRequest, match=message):
        engine.add(Request("a", (5, 6), sampling))
    assert not engine.has_unfinished


def test_prompt_logprobs_of_a_prompt_whose_logits_take_too_much_are_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("mamba")
    monkeypatch.setattr("octavo.static_engine.engine.MOST_LOGITS_BYTES", 5 * VOCAB_SIZE * 4)
    engine.add(make_request(engine, "a", PROMPTS[0], prompt_logprobs=0, max_tokens=1))
    message = "^prompt_logprobs of 12 prompt tokens takes 12,336 bytes of logits but at most 5,140 "
    with pytest.raises(InvalidRequest, match=message):
        engine.add(make_request(engine, "b", PROMPTS[2], prompt_logprobs=0))
    run(engine)


def test_an_aborted_batch_gives_way_to_the_next_at_once(
    make_engine: MakeEngine, generate_alone: Callable[..., list[int]]
) -> None:
    engine = make_engine("jamba")
    engine.add(make_request(engine, "a", PROMPTS[1], max_tokens=500, ignore_eos=True))
    engine.step()
    engine.add(make_request(engine, "b", PROMPTS[0]))
    engine.step()
    (last,) = engine.abort("a")
    assert last.finish_reason is FinishReason.ABORT
    assert tokens_of(run(engine)["b"]) == generate_alone("jamba", PROMPTS[0], 8)


def test_one_answer_of_several_can_be_ended(make_engine: MakeEngine) -> None:
    engine = make_engine("bloom")
    engine.add(make_request(engine, "a", PROMPTS[0], n=2, temperature=1.0, ignore_eos=True))
    begun = engine.step().outputs
    (last,) = engine.abort("a", FinishReason.STOP, 0)
    assert (last.index, last.finish_reason) == (0, FinishReason.STOP)
    rest = run(engine)["a"]
    assert len(tokens_of([*begun, *rest], 0)) == 1
    assert len(tokens_of([*begun, *rest], 1)) == 8


def test_a_model_that_fails_in_a_batch_ends_the_engine_with_its_error(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StaticEngine.load(EngineConfig(str(checkpoint("mamba")), cpu_threads=1, device="cpu"))
    engine.add(make_request(engine, "a", PROMPTS[0]))
    engine.step()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no more")

    monkeypatch.setattr("transformers.MambaForCausalLM.forward", fail)
    with pytest.raises(ValueError, match=r"^no more$"):
        engine.step()


@pytest.fixture
def have_room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets Mamba have memory for so many tokens a step, and no others."""
    forward = transformers.MambaForCausalLM.forward

    def limit(most: int, error: Exception) -> None:
        def limited(self: Any, input_ids: Any, *args: Any, **named: Any) -> Any:
            if input_ids.numel() > most:
                raise error
            return forward(self, input_ids, *args, **named)

        # The class's own signature says which arguments `generate` may pass.
        monkeypatch.setattr(
            "transformers.MambaForCausalLM.forward", functools.wraps(forward)(limited)
        )

    return limit


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=repr,
)
def test_a_batch_that_takes_too_much_memory_is_halved(
    error: Exception,
    make_engine: MakeEngine,
    have_room_for: Callable[..., None],
    generate_alone: Callable[..., list[int]],
) -> None:
    """Five prompts of up to 30 tokens: of 150 tokens, and half of them, only one fits at a time."""
    engine = make_engine("mamba")
    alone = [generate_alone("mamba", prompt, 8) for prompt in PROMPTS]
    have_room_for(38, error)
    outputs = run(engine, [make_request(engine, str(i), p) for i, p in enumerate(PROMPTS)])
    assert [tokens_of(outputs[str(i)]) for i in range(len(PROMPTS))] == alone
    assert {len([o for o in each if o.finish_reason]) for each in outputs.values()} == {1}
    engine.check_integrity()


def test_a_batch_that_lacked_memory_is_not_tried_again_for_a_minute(
    checkpoint: Callable[[str], Path],
    have_room_for: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    config = EngineConfig(str(checkpoint("mamba")), cpu_threads=1, device="cpu")
    engine = StaticEngine(config, lambda: now_s)
    have_room_for(2 * len(PROMPTS[0]), MemoryError())

    def num_tries(at_s: float) -> int:
        nonlocal now_s
        now_s = at_s
        caplog.clear()
        outputs = run(engine, [make_request(engine, str(place), PROMPTS[0]) for place in range(4)])
        assert [len(tokens_of(each)) for each in outputs.values()] == [8] * 4
        return caplog.text.count("takes more memory than there is")

    assert [num_tries(0.0), num_tries(59.0), num_tries(61.0)] == [1, 0, 1]


def test_a_prompt_that_takes_too_much_memory_alone_ends_and_no_other(
    make_engine: MakeEngine, have_room_for: Callable[..., None]
) -> None:
    engine = make_engine("mamba")
    have_room_for(29, MemoryError())
    outputs = run(engine, [make_request(engine, str(i), p) for i, p in enumerate(PROMPTS)])
    (failed,) = outputs["4"]
    assert failed.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, EngineError)
    assert str(failed.error).startswith(
        "there is not enough memory for a batch of 1 whose longest text has 30 tokens; "
    )
    assert [len(tokens_of(outputs[str(place)])) for place in range(4)] == [8] * 4
    engine.check_integrity()


def test_a_batch_that_runs_out_of_memory_later_ends_and_the_next_begins(
    make_engine: MakeEngine, have_room_for: Callable[..., None]
) -> None:
    engine = make_engine("mamba")
    engine.add(make_request(engine, "a", PROMPTS[0], n=2))
    engine.add(make_request(engine, "b", PROMPTS[0]))
    engine.step()
    have_room_for(0, MemoryError())
    ended = engine.step().outputs
    assert [(each.request_id, each.index) for each in ended] == [("a", 0), ("a", 1), ("b", 0)]
    assert {each.finish_reason for each in ended} == {FinishReason.ERROR}
    have_room_for(1000, MemoryError())
    assert len(answer(engine, PROMPTS[0])) == 8
    engine.check_integrity()


def test_an_engine_that_is_dropped_in_a_batch_takes_its_thread_along(
    checkpoint: Callable[[str], Path],
) -> None:
    before = set(threading.enumerate())
    engine = StaticEngine.load(EngineConfig(str(checkpoint("mpt")), cpu_threads=1, device="cpu"))
    engine.add(make_request(engine, "a", PROMPTS[0]))
    engine.step()
    assert set(threading.enumerate()) - before
    del engine
    gc.collect()
    assert not set(threading.enumerate()) - before
