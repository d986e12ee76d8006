"""Answers that must have a form have it, whatever the model would say and whoever runs beside."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, QueueFull
from octavo.executor.model_runner import ModelRunner
from octavo.grammar.matcher import GrammarMatcher
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams

EOS = 7  # of the tiny models, whose vocabulary is 331; the tokenizer has 257 tokens
PROMPT = [40, 41, 42, 43, 44]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
#: llguidance is bounded neither in time nor in memory here.
ENDLESS = {"json": {"type": "integer", "multipleOf": 99_999_989}}


@pytest.fixture(scope="module")
def runner(checkpoints: dict[str, Path]) -> ModelRunner:
    """One tiny model for all engines of this module."""
    return ModelRunner(_config(checkpoints["llama"]))


def _config(model: Path, **options: Any) -> EngineConfig:
    values = {"num_kv_blocks": 128, "swap_space_bytes": 0, "cpu_threads": 1, "block_size": 16}
    return EngineConfig.from_mapping({"model": str(model), **values, **options})


@pytest.fixture
def make_driver(checkpoints, byte_tokenizer, runner, drive):
    def make(num_blocks: int = 128, steps_ahead: int = 0, **options: Any):
        config = _config(checkpoints["llama"], tokenizer=str(byte_tokenizer), **options)
        return drive(config, runner, num_blocks, 0, steps_ahead)

    return make


@pytest.fixture
def text_of(byte_tokenizer) -> Callable[[list[int]], str]:
    """Decode an answer, which may end in the end of text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(byte_tokenizer)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    return decode


def params(form: dict[str, Any], **values: Any) -> SamplingParams:
    defaults = {"temperature": 1.5, "seed": 0, "max_tokens": 400}
    return SamplingParams.from_mapping({"structured_outputs": form, **defaults, **values})


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 8
        and 0 <= person["age"] <= 150
        and set(person["tags"]) <= {"a", "b"}
    )


NESTED = 'root ::= "<" [a-c]? ">" | "(" root ")"'
FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": PERSON}, is_person),
    ({"json": json.dumps(PERSON)}, is_person),
    ({"regex": r"[0-9]{3}-(ab|cd){1,4}é?"}, re.compile(r"[0-9]{3}-(ab|cd){1,4}é?").fullmatch),
    ({"choice": ["yes", "yes, sir", 'a "b"\né']}, ["yes", "yes, sir", 'a "b"\né'].__contains__),
    (
        {"grammar": 'root ::= "<" [a-c]? ">" | "(" root ")"'},
        re.compile(r"\(*<[abc]?>\)*").fullmatch,
    ),
    ({"grammar": 'start: "x" item? "y"\nitem: /[0-9]/'}, re.compile("x[0-9]?y").fullmatch),
    # What looks like a special token is text, and the end-of-text token does not stand for it.
    ({"choice": ["a<|im_end|>", "<|endoftext|>b"]}, ["a<|im_end|>", "<|endoftext|>b"].__contains__),
    ({"json": {"const": "<|im_start|>"}}, '"<|im_start|>"'.__eq__),
]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_every_answer_has_its_form_at_any_seed(make_driver, text_of, steps_ahead):
    driver = make_driver(steps_ahead=steps_ahead)
    for index, (form, _) in enumerate(FORMS):
        for seed in range(4):
            driver.add(f"{index} {seed}", PROMPT, params(form, seed=seed, top_p=0.95))
    driver.add("free", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
    driver.run()
    for index, (form, has_form) in enumerate(FORMS):
        for seed in range(4):
            text = text_of(driver.tokens(f"{index} {seed}"))
            assert has_form(text), (form, text)
            assert driver.outputs[f"{index} {seed}", 0][-1].finish_reason is FinishReason.STOP
    assert len(driver.tokens("free")) == 60


def test_json_object_is_an_object(make_driver, text_of):
    driver = make_driver()
    # Biased towards what closes: a random model would open levels for ever.
    bias = {str(i): 30 for i, name in enumerate(_names()) if name in '}"'}
    bias |= {str(i): -100 for i, name in enumerate(_names()) if name in "{[ĊĠĉč"}
    driver.add("a", PROMPT, params({"json_object": "true"}, logit_bias=bias))
    driver.run()
    assert isinstance(json.loads(text_of(driver.tokens("a"))), dict)


def _names() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters[:EOS], "<end>", *letters[EOS:]]


def test_answers_of_one_request_follow_the_form_each_by_itself(make_driver, text_of):
    driver = make_driver()
    driver.add("a", PROMPT, params({"json": PERSON}, n=3))
    driver.run()
    texts = [text_of(driver.tokens("a", index)) for index in range(3)]
    assert all(map(is_person, texts))
    assert len(set(texts)) == 3


def test_a_preempted_answer_is_the_same_to_the_bit(make_driver):
    alone = make_driver()
    alone.add("a", PROMPT, params({"json": PERSON}, logprobs=0))
    alone.run()
    driver = make_driver()
    driver.add("a", PROMPT, params({"json": PERSON}, logprobs=0))
    driver.add("other", PROMPT * 3, SamplingParams(max_tokens=30, ignore_eos=True))

    def preempt() -> None:
        for sequence in [*driver.scheduler.running]:
            if sequence.request_id == "a" and driver.now_s % 5 == 0:
                driver.preempt(sequence)

    driver.run(preempt)
    assert driver.engine.stats().num_preemptions_total > 2
    assert driver.trace("a") == alone.trace("a")


def test_neighbours_do_not_change_an_answer_nor_it_theirs(make_driver):
    free = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, logprobs=0)
    alone = make_driver()
    alone.add("free", PROMPT, free)
    alone.run()
    driver = make_driver()
    driver.add_all([(PROMPT, params({"json": PERSON}, seed=seed)) for seed in range(5)])
    driver.add("free", PROMPT, free)
    driver.run()
    assert driver.trace("free") == alone.trace("free")


def test_the_end_is_drawn_where_the_form_allows_nothing_else(make_driver, text_of):
    driver = make_driver()
    driver.add("min_tokens", PROMPT, params({"choice": ["yes"]}, min_tokens=50))
    driver.add("ignore_eos", PROMPT, params({"choice": ["yes"]}, ignore_eos=True))
    driver.add("longest", PROMPT, params({"regex": "a{0,9}"}, min_tokens=50))
    driver.run()
    assert text_of(driver.tokens("min_tokens")) == "yes"
    assert text_of(driver.tokens("ignore_eos")) == "yes"
    assert text_of(driver.tokens("longest")) == "a" * 9
    assert {outputs[-1].finish_reason for outputs in driver.outputs.values()} == {FinishReason.STOP}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(a"}, "structured_outputs.regex does not compile: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex does not compile: "),
        ({"json": {"type": "what"}}, "structured_outputs.json does not compile: .*what"),
        ({"json": {"if": {}, "then": {}}}, "structured_outputs.json does not compile: Unimpl"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no answer"),
        ({"grammar": "root ::= root"}, "structured_outputs.grammar does not compile: no answer"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar does not compile: .*GBNF"),
        ({"grammar": "root ::= " + "(" * 5000}, "structured_outputs.grammar does not compile: "),
        (ENDLESS, "structured_outputs.json does not compile: it takes more than 5 s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_form_that_cannot_be_followed_ends_its_own_request_alone(make_driver, form, message):
    driver = make_driver()
    driver.add("good", PROMPT, params({"choice": ["yes"]}))
    driver.add("bad", PROMPT, params(form, n=2))
    driver.add("free", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    driver.run()
    for index in range(2):
        (output,) = driver.outputs["bad", index]
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, InvalidRequest)
        assert re.search(message, str(output.error)), output.error
    assert driver.outputs["good", 0][-1].finish_reason is FinishReason.STOP
    assert len(driver.tokens("free")) == 5


def test_a_form_that_grows_too_much_on_the_way_ends_its_request(make_driver, byte_tokenizer):
    driver = make_driver()
    driver.add("a", PROMPT, params({"regex": "[a-c]{90}"}))
    driver.add("free", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    while not driver.outputs["a", 0]:
        driver.step()
    # As if its form, which a request has no other way to, had many more states than are allowed.
    growing = LLMatcher(
        load_vocabulary(str(byte_tokenizer), [EOS]),
        LLMatcher.grammar_from_regex("([a-c]*a[a-c]{25}c|[a-c]*b[a-c]{25}c)"),
        log_level=0,
        limits=LLParserLimits(max_lexer_states=100, verbose_errors=False),
    )
    (sequence,) = (s for s in driver.scheduler.running if s.request_id == "a")
    sequence.follow(GrammarMatcher(growing, 257, "structured_outputs.regex"))
    driver.run()
    last = driver.outputs["a", 0][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, InvalidRequest)
    message = "structured_outputs.regex cannot be followed any further: .*too many states"
    assert re.match(message, str(last.error))
    assert len(driver.tokens("free")) == 30


def test_others_stream_while_a_grammar_is_compiled(make_driver):
    driver = make_driver()
    driver.add("free", PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
    driver.add("bad", PROMPT, params(ENDLESS), deadline_s=80.0)
    stats, worst_s = driver.engine.stats(), 0.0
    assert stats.num_waiting == 2
    for _ in range(60):
        started_s = time.perf_counter()
        driver.step()
        worst_s = max(worst_s, time.perf_counter() - started_s)
    assert len(driver.tokens("free")) == 60
    assert worst_s < 1.0
    assert driver.engine.stats().num_waiting == 1
    assert not driver.outputs["bad", 0]
    driver.run()
    (output,) = driver.outputs["bad", 0]
    assert output.finish_reason is FinishReason.DEADLINE


def test_a_request_is_ended_while_its_grammar_is_compiled(make_driver):
    driver = make_driver(max_num_queued_requests=1)
    driver.add("a", PROMPT, params(ENDLESS))
    assert driver.engine.has_unfinished
    with pytest.raises(InvalidRequest, match="'a' is already in use"):
        driver.add("a", PROMPT, params(ENDLESS))
    with pytest.raises(
        QueueFull, match="1 request waits for a grammar and max_num_queued_requests is 1; "
    ):
        driver.add("b", PROMPT, params(ENDLESS))
    assert driver.engine.stats().num_requests_refused_total == 1
    driver.step()
    (last,) = driver.engine.abort("a")
    assert last.finish_reason is FinishReason.ABORT
    assert not driver.engine.has_unfinished
    assert driver.engine.abort("a") == ()


def test_waiting_for_a_grammar_neither_spins_nor_oversleeps(make_driver):
    driver = make_driver()
    driver.add("warm", PROMPT, params({"choice": ["yes"]}))
    driver.run()
    driver.add("a", PROMPT, params({"choice": ["no"]}))
    num_steps = 0
    while not driver.outputs["a", 0]:
        driver.step()
        num_steps += 1
    assert num_steps < 100
