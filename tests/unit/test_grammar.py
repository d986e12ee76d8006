"""Grammars: what is compiled and remembered, what is refused in time, which tokens are allowed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

from octavo.errors import EngineError, InvalidRequest
from octavo.grammar.compiler import FormCache, GrammarCompiler
from octavo.grammar.matcher import GrammarMatcher, fill_masks
from octavo.grammar.probe import follow, probe
from octavo.grammar.translation import make_matcher, translate
from octavo.structured_outputs import StructuredOutputs

EOS = 256


class Bytes:
    """Tokens are single bytes, and an end."""

    tokens = (*(bytes([value]) for value in range(256)), b"")
    special_token_ids = (EOS,)
    eos_token_id = EOS
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


@pytest.fixture
def make(vocabulary):
    """Make the matcher of a regular expression."""

    def make_one(pattern: str) -> GrammarMatcher:
        wanted = StructuredOutputs("regex", pattern)
        matcher = make_matcher(wanted, translate(wanted), vocabulary)
        return GrammarMatcher(matcher, vocabulary.vocab_size, "structured_outputs.regex")

    return make_one


def allowed(*matchers: GrammarMatcher) -> list[list[int]]:
    masks = fill_masks(matchers, LLExecutor(1))
    return [
        np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder="little")).tolist() for m in masks
    ]


def regex(pattern: str) -> StructuredOutputs:
    return StructuredOutputs("regex", pattern)


def test_masks_are_those_of_each_matcher_and_of_tokens_there_are(make):
    assert allowed(make("[ab]c"), make(".*"), make("x?")) == [
        [97, 98],
        [*range(10), *range(11, 128), *range(0xC2, 0xF5), EOS],
        [120, EOS],
    ]
    assert fill_masks([make("a")], LLExecutor(1)).shape == (1, 9)  # 257 tokens


def test_a_matcher_is_over_when_the_end_has_come(make):
    whole = make("a")
    whole.advance(97)
    assert (allowed(whole), whole.is_over) == ([[EOS]], False)
    whole.advance(EOS)
    assert whole.is_over
    assert whole.fork().is_over
    early = make("a*")
    early.advance(EOS)
    assert early.is_over
    assert early.error is None


def test_a_fork_goes_on_by_itself(make):
    one = make("(ab|cd)e")
    one.advance(97)
    other = one.fork()
    one.advance(98)
    assert allowed(one, other) == [[101], [98]]


def test_a_matcher_that_failed_allows_nothing_and_says_why(make):
    failed, sound = make("a"), make("a")
    failed.advance(98)
    assert allowed(failed, sound) == [[], [97]]
    assert failed.error.startswith("structured_outputs.regex cannot be followed any further: ")
    assert not failed.is_over


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "structured_outputs.regex does not compile: .*unclosed group"),
        ("json", '{"type": "integer", "multipleOf": 99999989}', "it takes more than 1.5 s"),
        ("json", '{"allOf": [{"anyOf": [{"$ref": "x"}]}]}', "structured_outputs.json does not"),
        ("json", "[" * 5000, "structured_outputs.json does not compile"),
        ("grammar", 'root ::= a\na ::= a "x"', "no answer follows it"),
        ("grammar", 'root ::= "a" |' + ' "a" |' * 20_000 + ' "b"', "does not compile"),
        ("regex", "(?=a)b", "structured_outputs.regex does not compile"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_time(kind, text, message):
    started_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=message):
        probe(StructuredOutputs(kind, text), time_limit_s=1.5)
    assert time.monotonic() - started_s < 3.0


def test_a_probe_returns_what_the_library_compiles(vocabulary):
    grammar = probe(StructuredOutputs("choice", '["yes", "n\\"o"]'))
    wanted = StructuredOutputs("choice", "")
    matcher = GrammarMatcher(make_matcher(wanted, grammar, vocabulary), 257, "")
    assert allowed(matcher) == [[ord("n"), ord("y")]]
    assert follow(make_matcher(wanted, grammar, vocabulary), 64) == ""


def test_a_cache_keeps_the_forms_used_last():
    asked: list[str] = []

    def translate(wanted: StructuredOutputs) -> str:
        asked.append(wanted.text)
        return wanted.text.upper()

    cache = FormCache(translate, max_count=2, max_bytes=100)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert cache.grammar_of(regex(name)) == name.upper()
    assert asked == ["a", "b", "c", "b"]
    cache.grammar_of(regex("x" * 99))
    assert len(cache) == 2  # it and b
    cache.grammar_of(regex("y" * 101))
    assert len(cache) == 0


def test_a_cache_remembers_refusals_but_not_other_failures():
    errors = iter([InvalidRequest("no"), OSError("busy"), InvalidRequest("never")])

    def translate(wanted: StructuredOutputs) -> str:
        raise next(errors)

    cache = FormCache(translate)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no"):
            cache.grammar_of(regex("a"))
    with pytest.raises(OSError, match="busy"):
        cache.grammar_of(regex("b"))
    with pytest.raises(InvalidRequest, match="never"):
        cache.grammar_of(regex("b"))


def test_a_form_that_several_want_at_once_is_translated_once(vocabulary):
    gate, asked = threading.Event(), []

    def translate_slowly(wanted: StructuredOutputs) -> str:
        asked.append(wanted.text)
        gate.wait(10)
        return translate(wanted)

    compiler = GrammarCompiler(lambda: vocabulary, translate_slowly)
    matchers = [compiler.start(regex("ab")) for _ in range(4)]
    gate.set()
    one, other, *_ = (each.result(10) for each in matchers)
    one.advance(97)
    assert allowed(one, other) == [[98], [97]]
    assert asked == ["ab"]


def test_a_vocabulary_that_cannot_be_loaded_is_tried_again(vocabulary):
    answers = iter([EngineError("there is none"), vocabulary])

    def load() -> LLTokenizer:
        answer = next(answers)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    compiler = GrammarCompiler(load, translate)
    with pytest.raises(EngineError, match="there is none"):
        compiler.start(regex("a")).result(10)
    assert allowed(compiler.start(regex("a")).result(10)) == [[97]]
