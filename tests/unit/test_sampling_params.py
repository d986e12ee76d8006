"""Sampling parameters: every key, every refusal, and what a request gets in the end."""

from __future__ import annotations

import ast
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise

import pytest

from octavo import sampling_params
from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputs

INT = "an integer"
POSITIVE = "an integer from 1 to 2,147,483,647"
TOP_K = f"-1 or 0 (all) or {POSITIVE}"
SEED = "a signed 64-bit integer"
IDS = "token ids in [0, 2,147,483,647]"
REPETITION = "a number in [0.000001, 1,000,000]"
BIASES = "an object of token ids and biases"
FORM = "json, regex, choice, grammar, json_object"
FORM_SIZE = "bytes but at most 262,144 may be"
form = StructuredOutputs

GOOD = [
    ("n", "3", 3),
    ("n", 128.0, 128),
    ("beam_width", "64", 64),
    ("length_penalty", "1", 1.0),
    ("temperature", 0, 0.0),
    ("temperature", "0.1", 0.1),
    ("temperature", 1_000_000, 1e6),
    ("top_k", -1, -1),
    ("top_k", "40", 40),
    ("top_k", 40.0, 40),
    ("top_k", 2**31 - 1, 2**31 - 1),
    ("top_p", "1", 1.0),
    ("top_p", 5e-324, 5e-324),
    ("min_p", "0", 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", "1.2", 1.2),
    ("repetition_penalty", 1e-6, 1e-6),
    ("repetition_penalty", 1_000_000, 1e6),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", "2", 2.0),
    ("frequency_penalty", "-0.5", -0.5),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", {"42": 5, 7: "-1.5"}, ((7, -1.5), (42, 5.0))),
    ("logit_bias", '{"3": -100, "2": 100}', ((2, 100.0), (3, -100.0))),
    ("logit_bias", {"5": 1, "05": 2}, ((5, 2.0),)),
    ("logit_bias", ((5, 1.0), (9, 2.0)), ((5, 1.0), (9, 2.0))),
    ("logit_bias", {}, ()),
    ("allowed_token_ids", 3, (3,)),
    ("allowed_token_ids", ["3", 2, 3], (3, 2)),
    ("allowed_token_ids", [2**31 - 1], (2**31 - 1,)),
    ("lora_name", "legal-v2", "legal-v2"),
    ("bad_words", "END", ("END",)),
    ("bad_words", [" b", "a", " b"], (" b", "a")),
    ("bad_words", [], ()),
    ("bad_words", ["x" * 16_384], ("x" * 16_384,)),
    ("structured_outputs", {"json": {"b": 1, "a": 2}}, form("json", '{"b":1,"a":2}')),
    ("structured_outputs", '{"json": "{ }", "regex": null}', form("json", "{}")),
    ("structured_outputs", {"regex": "[a-z]é"}, form("regex", "[a-z]é")),
    ("structured_outputs", {"choice": "yes"}, form("choice", '["yes"]')),
    ("structured_outputs", {"choice": ["b", "a", "b"]}, form("choice", '["b", "a"]')),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, form("grammar", 'root ::= "a"')),
    ("structured_outputs", {"json_object": "true"}, form("json_object", "")),
    (
        "structured_outputs",
        {"regex": "a", "json": None, "_backend_was_auto": False},
        form("regex", "a"),
    ),
    ("structured_outputs", {"regex": "x" * 262_144}, form("regex", "x" * 262_144)),
    ("structured_outputs", form("regex", "a"), form("regex", "a")),
    ("logprobs", 0, 0),
    ("logprobs", "5", 5),
    ("prompt_logprobs", 20.0, 20),
    ("seed", -(2**63), -(2**63)),
    ("seed", str(2**63 - 1), 2**63 - 1),
    ("max_tokens", "7", 7),
    ("min_tokens", 0, 0),
    ("stop", "END", ("END",)),
    ("stop", ["b", "a", "b"], ("b", "a")),
    ("stop", [], ()),
    ("stop", ["x"] * 256, ("x",)),
    ("stop", "x" * 16_384, ("x" * 16_384,)),
    ("stop", "\u0000é😀\ud800", ("\u0000é😀\ud800",)),
    ("stop_token_ids", 3, (3,)),
    ("stop_token_ids", ["3", 2, 3.0], (3, 2)),
    ("ignore_eos", True, True),
    ("ignore_eos", "False", False),
    ("ignore_eos", "1", True),
    ("include_stop_str_in_output", "true", True),
    ("skip_special_tokens", "0", False),
    ("spaces_between_special_tokens", False, False),
]

BAD = [
    ("structured_outputs", 5, f"structured_outputs is 5 but must be an object with one of {FORM}"),
    ("structured_outputs", "{", "structured_outputs is not valid JSON: "),
    ("structured_outputs", "[]", "structured_outputs must be a JSON object, not list"),
    ("structured_outputs", {}, f"structured_outputs has none of them but must have one of {FORM}"),
    (
        "structured_outputs",
        {"json": {}, "regex": "a"},
        f"structured_outputs has json and regex but must have one of {FORM}",
    ),
    (
        "structured_outputs",
        {"jsn": {}},
        f"structured_outputs has key 'jsn' but allowed are {FORM}",
    ),
    (
        "structured_outputs",
        {"json": [1]},
        "structured_outputs.json is [1] but must be a JSON schema",
    ),
    ("structured_outputs", {"json": "{'"}, "structured_outputs.json is not valid JSON: "),
    (
        "structured_outputs",
        {"json": {"const": float("nan")}},
        "structured_outputs.json is {'const': nan} but must be a JSON schema",
    ),
    (
        "structured_outputs",
        {"regex": ""},
        "structured_outputs.regex is '' but must be a string of at least one character",
    ),
    (
        "structured_outputs",
        {"grammar": 5},
        "structured_outputs.grammar is 5 but must be a string of at least one character",
    ),
    (
        "structured_outputs",
        {"choice": []},
        "structured_outputs.choice is [] but must be a list of at least one string",
    ),
    (
        "structured_outputs",
        {"choice": ["a", ""]},
        "structured_outputs.choice is ['a', ''] but must be a list of at least one string",
    ),
    (
        "structured_outputs",
        {"choice": [1]},
        "structured_outputs.choice is [1] but must be a string or a list of strings",
    ),
    (
        "structured_outputs",
        {"choice": [str(i) for i in range(10_000)]},
        "structured_outputs.choice has 10,000 strings but at most 1,024 are allowed",
    ),
    (
        "structured_outputs",
        {"json_object": "false"},
        "structured_outputs.json_object is 'false' but must be true",
    ),
    (
        "structured_outputs",
        {"json_object": False, "json": None},
        f"structured_outputs has none of them but must have one of {FORM}",
    ),
    (
        "structured_outputs",
        {"regex": "a", "disable_any_whitespace": True},
        f"structured_outputs has key 'disable_any_whitespace' but allowed are {FORM}",
    ),
    (
        "structured_outputs",
        {"regex": "é" * 131_073},
        f"structured_outputs.regex has 262,146 {FORM_SIZE}",
    ),
    (
        "structured_outputs",
        {"regex": "\ud800"},
        "structured_outputs.regex has a lone surrogate but must be Unicode text",
    ),
    ("n", 0, "n is 0 but must be an integer from 1 to 128"),
    ("n", 129, "n is 129 but must be an integer from 1 to 128"),
    ("n", "two", f"n is 'two' but must be {INT}"),
    ("beam_width", 0, "beam_width is 0 but must be an integer from 1 to 64"),
    ("beam_width", 65, "beam_width is 65 but must be an integer from 1 to 64"),
    ("beam_width", True, f"beam_width is True but must be {INT}"),
    ("length_penalty", "nan", "length_penalty is nan but must be a number in [-10, 10]"),
    ("length_penalty", -10.1, "length_penalty is -10.1 but must be a number in [-10, 10]"),
    ("length_penalty", 0, "length_penalty is 0.0 but must be 1 where beam_width is 1"),
    ("temperature", float("nan"), "temperature is nan but must be a number in [0, 1,000,000]"),
    ("temperature", "nan", "temperature is nan but must be a number in [0, 1,000,000]"),
    ("temperature", "inf", "temperature is inf but must be a number in [0, 1,000,000]"),
    ("temperature", -0.1, "temperature is -0.1 but must be a number in [0, 1,000,000]"),
    ("temperature", 1e7, "temperature is 10000000.0 but must be a number in [0, 1,000,000]"),
    ("temperature", True, "temperature is True but must be a number"),
    ("temperature", "hot", "temperature is 'hot' but must be a number"),
    ("temperature", [1], "temperature is [1] but must be a number"),
    ("temperature", 10**400, f"temperature is 1{'0' * 79} but must be a number"),
    ("temperature", 10**5000, "temperature is a number of thousands of digits but must be"),
    ("top_k", -2, f"top_k is -2 but must be {TOP_K}"),
    ("top_k", 2**31, f"top_k is 2147483648 but must be {TOP_K}"),
    ("top_k", 2.5, f"top_k is 2.5 but must be {INT}"),
    ("top_k", "2.5", f"top_k is '2.5' but must be {INT}"),
    ("top_k", float("inf"), f"top_k is inf but must be {INT}"),
    ("top_k", float("nan"), f"top_k is nan but must be {INT}"),
    ("top_k", False, f"top_k is False but must be {INT}"),
    ("top_k", 10**5000, f"top_k is a number of thousands of digits but must be {TOP_K}"),
    ("top_k", "9" * 5000, f"top_k is '{'9' * 79} but must be {INT}"),
    ("top_p", 0, "top_p is 0.0 but must be a number in (0, 1]"),
    ("top_p", 1.0000001, "top_p is 1.0000001 but must be a number in (0, 1]"),
    ("min_p", -1e-9, "min_p is -1e-09 but must be a number in [0, 1]"),
    ("min_p", 2, "min_p is 2.0 but must be a number in [0, 1]"),
    ("repetition_penalty", 0, f"repetition_penalty is 0.0 but must be {REPETITION}"),
    ("repetition_penalty", -1.5, f"repetition_penalty is -1.5 but must be {REPETITION}"),
    ("repetition_penalty", 1e7, f"repetition_penalty is 10000000.0 but must be {REPETITION}"),
    ("repetition_penalty", "nan", f"repetition_penalty is nan but must be {REPETITION}"),
    ("presence_penalty", 2.1, "presence_penalty is 2.1 but must be a number in [-2, 2]"),
    ("presence_penalty", "no", "presence_penalty is 'no' but must be a number"),
    ("frequency_penalty", "-inf", "frequency_penalty is -inf but must be a number in [-2, 2]"),
    ("frequency_penalty", [], "frequency_penalty is [] but must be a number"),
    ("logit_bias", [1, 2], f"logit_bias is [1, 2] but must be {BIASES}"),
    ("logit_bias", (1, 2), f"logit_bias is (1, 2) but must be {BIASES}"),
    ("logit_bias", 5, f"logit_bias is 5 but must be {BIASES}"),
    ("logit_bias", "[]", f"logit_bias is [] but must be {BIASES}"),
    ("logit_bias", "{", "logit_bias is not valid JSON: "),
    ("logit_bias", {"x": 1}, "logit_bias: a token id is 'x' but must be an integer"),
    ("logit_bias", {"5": "x"}, "logit_bias of '5' is 'x' but must be a number"),
    ("logit_bias", {"-1": 1}, f"logit_bias is -1 but must be {IDS}"),
    ("logit_bias", {2**31: 1}, f"logit_bias is 2147483648 but must be {IDS}"),
    ("logit_bias", {5: "nan"}, "logit_bias has nan for 5 but must have numbers in [-100, 100]"),
    ("logit_bias", {5: 101}, "logit_bias has 101.0 for 5 but must have numbers in [-100, 100]"),
    ("logit_bias", dict.fromkeys(range(4097), 1), "logit_bias has 4,097 tokens but at most 4,096"),
    ("allowed_token_ids", [], "allowed_token_ids has 0 ids but must have at least 1"),
    ("allowed_token_ids", [4, -1], f"allowed_token_ids is -1 but must be {IDS}"),
    ("allowed_token_ids", [2**31, 5], f"allowed_token_ids is 2147483648 but must be {IDS}"),
    ("allowed_token_ids", "all", f"allowed_token_ids is 'all' but must be {INT}"),
    ("lora_name", ["a"], "lora_name is ['a'] but must be a string"),
    ("bad_words", [1], "bad_words is [1] but must be a string or a list of strings"),
    ("bad_words", ["a", ""], "bad_words has an empty string but each must have a character"),
    ("bad_words", [str(i) for i in range(257)], "bad_words has 257 strings but at most 256 are"),
    ("bad_words", "x" * 16_385, "bad_words has 16,385 characters in all but at most 16,384 are"),
    ("logprobs", -1, "logprobs is -1 but must be an integer of at least 0"),
    ("logprobs", True, f"logprobs is True but must be {INT}"),
    ("logprobs", "all", f"logprobs is 'all' but must be {INT}"),
    ("prompt_logprobs", -2, "prompt_logprobs is -2 but must be an integer of at least 0"),
    ("prompt_logprobs", [1], f"prompt_logprobs is [1] but must be {INT}"),
    ("seed", 2**63, f"seed is 9223372036854775808 but must be {SEED}"),
    ("seed", -(2**63) - 1, f"seed is -9223372036854775809 but must be {SEED}"),
    ("seed", "abc", f"seed is 'abc' but must be {INT}"),
    ("max_tokens", 0, f"max_tokens is 0 but must be {POSITIVE}"),
    ("max_tokens", 2**31, f"max_tokens is 2147483648 but must be {POSITIVE}"),
    ("max_tokens", {}, f"max_tokens is {{}} but must be {INT}"),
    ("min_tokens", -1, "min_tokens is -1 but must be an integer in [0, 2,147,483,647]"),
    ("stop", 5, "stop is 5 but must be a string or a list of strings"),
    ("stop", ["a", None], "stop is ['a', None] but must be a string or a list of strings"),
    ("stop", "", "stop has an empty string but each must have a character"),
    ("stop", ["a", "b" * 16_384], "stop has 16,385 characters in all but at most 16,384 are"),
    ("stop", [str(i) for i in range(10_000)], "stop has 10,000 strings but at most 256 are"),
    ("stop", [str(i) for i in range(257)], "stop has 257 strings but at most 256 are allowed"),
    ("stop_token_ids", [-1], f"stop_token_ids is -1 but must be {IDS}"),
    ("stop_token_ids", [2**31], f"stop_token_ids is 2147483648 but must be {IDS}"),
    ("stop_token_ids", [[1]], f"stop_token_ids is [1] but must be {INT}"),
    ("stop_token_ids", [True], f"stop_token_ids is True but must be {INT}"),
    ("stop_token_ids", list(range(257)), "stop_token_ids has 257 ids but at most 256 are allowed"),
    ("ignore_eos", "yes", "ignore_eos is 'yes' but must be true or false"),
    ("ignore_eos", 1, "ignore_eos is 1 but must be true or false"),
    ("include_stop_str_in_output", "on", "include_stop_str_in_output is 'on' but must be true or"),
    ("skip_special_tokens", 0.0, "skip_special_tokens is 0.0 but must be true or false"),
    ("spaces_between_special_tokens", [], "spaces_between_special_tokens is [] but must be true"),
]


def _names(cases):
    return [f"{key}-{index}" for index, (key, *_) in enumerate(cases)]


@pytest.mark.parametrize(("key", "given", "read"), GOOD, ids=_names(GOOD))
def test_a_good_value_is_read(key, given, read):
    value = getattr(SamplingParams.from_mapping({key: given}), key)
    assert value == read
    assert type(value) is type(read)
    assert SamplingParams(**{key: given}) == SamplingParams.from_mapping({key: given})


@pytest.mark.parametrize(("key", "given", "message"), BAD, ids=_names(BAD))
def test_a_bad_value_is_refused_with_what_is_allowed(key, given, message):
    for make in (SamplingParams.from_mapping, lambda values: SamplingParams(**values)):
        with pytest.raises(InvalidRequest) as caught:
            make({key: given})
        assert str(caught.value).startswith(message)
        assert len(str(caught.value)) < 250


def test_every_accepted_key_has_a_good_and_a_bad_case():
    keys = {field.name for field in fields(SamplingParams)}
    assert {key for key, *_ in GOOD} == keys
    assert {key for key, *_ in BAD} == keys


@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_an_engine_reports_only_so_many_of_a_token(key):
    SamplingParams(**{key: 20}).check_logprobs(9, max_logprobs=20)
    with pytest.raises(
        InvalidRequest, match=rf"^{key} is 21 but must be an integer from 0 to 20 \(max_logprobs\)$"
    ):
        SamplingParams(**{key: 21}).check_logprobs(9, max_logprobs=20)


def test_an_engine_reports_only_so_many_of_a_prompt():
    SamplingParams(prompt_logprobs=7).check_logprobs(32_768, max_logprobs=20)
    SamplingParams(logprobs=20).check_logprobs(10**9, max_logprobs=20)
    with pytest.raises(
        InvalidRequest,
        match=r"^prompt_logprobs is 7 and the prompt has 32,769 tokens, but tokens \* "
        r"\(prompt_logprobs \+ 1\) may be at most 262,144; ask for fewer or shorten it$",
    ):
        SamplingParams(prompt_logprobs=7).check_logprobs(32_769, max_logprobs=20)


def test_beams_give_at_most_as_many_answers_as_there_are_of_them():
    assert SamplingParams(n=4, beam_width=4).num_sequences == 4
    assert SamplingParams(n=2, beam_width=4).num_sequences == 4
    assert SamplingParams(n=2).num_sequences == 2
    message = r"^n is 5 but must be an integer from 1 to 4 \(beam_width\)$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(n=5, beam_width=4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0.5, "is 0.5 but must be 0 or 1"),
        ("top_k", 40, "is 40 but must be 0 or -1"),
        ("top_p", 0.9, "is 0.9 but must be 1"),
        ("min_p", 0.1, "is 0.1 but must be 0"),
        ("repetition_penalty", 1.1, "is 1.1 but must be 1"),
        ("presence_penalty", -1, "is -1.0 but must be 0"),
        ("frequency_penalty", 1, "is 1.0 but must be 0"),
        ("logit_bias", {"3": 1}, "is ((3, 1.0),) but must be absent"),
        ("allowed_token_ids", [1, 2], "is (1, 2) but must be absent"),
        ("bad_words", "no", "is ('no',) but must be absent"),
        ("structured_outputs", {"regex": "a"}, "but must be absent"),
        ("seed", 3, "is 3 but must be absent"),
        ("stop", "END", "is ('END',) but must be absent"),
    ],
)
def test_what_beams_would_ignore_is_refused(key, value, message):
    SamplingParams(**{key: value})
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{key: value}, beam_width=2)
    assert str(caught.value).startswith(f"{key} is ")
    assert str(caught.value).endswith(f"{message} where beam_width is above 1")


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {"top_k": -1}, {"length_penalty": -10}, {"min_tokens": 3}]
)
def test_what_changes_nothing_of_beams_may_stand_beside(values):
    params = SamplingParams(**values, beam_width=2)
    assert params.greedy
    assert params.resolve(95, 16).seed is None


def test_beams_must_not_be_more_than_tokens():
    SamplingParams(beam_width=8).check_vocabulary(8)
    message = r"^beam_width is 9 but must be an integer from 1 to 8 \(the vocabulary\)$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(beam_width=9).check_vocabulary(8)


def test_min_tokens_above_max_tokens_is_refused():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    message = r"^min_tokens is 4 but must be an integer in \[0, 3\]$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_an_unknown_key_names_the_nearest_and_lists_the_known():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({"temprature": 1})
    assert str(caught.value) == (
        "unknown sampling parameter 'temprature'; did you mean 'temperature'? (known: "
        "allowed_token_ids, bad_words, beam_width, cache_salt, deadline_ms, frequency_penalty, "
        "ignore_eos, include_stop_str_in_output, length_penalty, logit_bias, logprobs, lora_name, "
        "max_tokens, min_p, min_tokens, n, "
        "presence_penalty, priority, prompt_logprobs, repetition_penalty, seed, "
        "skip_special_tokens, spaces_between_special_tokens, stop, stop_token_ids, "
        "structured_outputs, temperature, "
        "tenant, top_k, top_p)"
    )


@pytest.mark.parametrize(
    "key",
    ["", "zzzz", "x" * 1_000_000, "\ud800"],
    ids=["empty", "near nothing", "megabyte", "lone surrogate"],
)
def test_an_unknown_key_of_any_form_is_shown_short(key):
    with pytest.raises(InvalidRequest, match=r"^unknown sampling parameter ") as caught:
        SamplingParams.from_mapping({key: 1})
    assert len(str(caught.value)) < 700


def test_null_means_the_default():
    values = dict.fromkeys(("temperature", "stop", "max_tokens", "ignore_eos", "lora_name"))
    assert SamplingParams.from_mapping(values) == SamplingParams()
    with pytest.raises(InvalidRequest, match=r"^unknown sampling parameter 'temprature'"):
        SamplingParams.from_mapping({"temprature": None})


def test_all_keys_are_read_at_once_and_those_of_scheduling_left_out():
    values = {
        "n": 2,
        "temperature": "0.5",
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"4": 1},
        "allowed_token_ids": [4, 5],
        "bad_words": "no",
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["END", "END"],
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    scheduling = {"priority": "wrong", "deadline_ms": -1, "tenant": 5, "cache_salt": []}
    read = SamplingParams.from_mapping(values | scheduling)
    defaults = SamplingParams()
    assert read == SamplingParams(**values)
    assert all(getattr(read, key) != getattr(defaults, key) for key in values)


def test_no_keys_give_the_defaults():
    assert SamplingParams.from_mapping({}) == SamplingParams()
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("given", "num_prompt_tokens", "max_tokens"),
    [
        (None, 10, 50),
        (None, 90, 10),
        (7, 10, 7),
        (1000, 10, 90),
        (None, 100, 1),
        (5, 10_000, 1),
    ],
)
def test_resolve_bounds_max_tokens_by_the_room(given, num_prompt_tokens, max_tokens):
    params = SamplingParams(max_tokens=given, seed=3)
    resolved = params.resolve(100 - num_prompt_tokens, default_max_tokens=50)
    assert resolved == SamplingParams(max_tokens=max_tokens, seed=3)


def test_resolve_lowers_min_tokens_with_max_tokens():
    resolved = SamplingParams(min_tokens=80).resolve(10, default_max_tokens=50)
    assert (resolved.min_tokens, resolved.max_tokens) == (10, 10)


def test_resolve_draws_a_seed_of_its_own_for_each_request():
    seeds = {SamplingParams().resolve(99, 50).seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parameters_are_frozen_and_cross_processes():
    params = SamplingParams(stop=("a",), seed=5)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(FrozenInstanceError):
        params.seed = 6


def test_every_key_is_documented():
    body = ast.parse(inspect.getsource(sampling_params.SamplingParams)).body[0].body
    pairs = [(a, b) for a, b in pairwise(body) if isinstance(a, ast.AnnAssign)]
    assert len(pairs) == len(fields(SamplingParams))
    assert all(len(b.value.value) > 20 for _, b in pairs)


@pytest.mark.parametrize(
    ("key", "given"),
    [("stop_token_ids", [5, 300]), ("allowed_token_ids", [300, 2]), ("logit_bias", {"300": 1})],
)
def test_a_token_that_the_model_does_not_have_is_refused(key, given):
    params = SamplingParams(**{key: given})
    params.check_vocabulary(301)
    with pytest.raises(InvalidRequest, match=f"^{key} has 300 but token ids are 0 to 299$"):
        params.check_vocabulary(300)


def test_only_penalties_that_change_something_penalize():
    assert not SamplingParams(repetition_penalty=1, presence_penalty=0, top_k=5).penalizes
    for key in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{key: 1.5}).penalizes
