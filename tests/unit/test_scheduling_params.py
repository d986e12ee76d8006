"""Scheduling parameters: every key, every refusal, and the time a deadline becomes."""

from __future__ import annotations

import ast
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise

import pytest

from octavo import scheduling_params
from octavo.errors import InvalidRequest
from octavo.scheduling_params import SCHEDULING_KEYS, SchedulingParams

PRIORITY = "an integer from -2,147,483,648 to 2,147,483,647"
DEADLINE = "a number of milliseconds in (0, 1,000,000,000,000]"

GOOD = [
    ("priority", 0, 0),
    ("priority", "-3", -3),
    ("priority", 2.0, 2),
    ("priority", -(2**31), -(2**31)),
    ("deadline_ms", 1, 1.0),
    ("deadline_ms", "0.5", 0.5),
    ("deadline_ms", 1e12, 1e12),
    ("tenant", "gold", "gold"),
    ("tenant", "é" * 256, "é" * 256),
    ("cache_salt", "", ""),
    ("cache_salt", "\ud800\0", "\ud800\0"),
]

BAD = [
    ("priority", 2**31, f"priority is 2147483648 but must be {PRIORITY}"),
    ("priority", 0.5, "priority is 0.5 but must be an integer"),
    ("priority", "high", "priority is 'high' but must be an integer"),
    ("priority", True, "priority is True but must be an integer"),
    ("priority", [1], "priority is [1] but must be an integer"),
    ("deadline_ms", 0, f"deadline_ms is 0.0 but must be {DEADLINE}"),
    ("deadline_ms", -1, f"deadline_ms is -1.0 but must be {DEADLINE}"),
    ("deadline_ms", "nan", f"deadline_ms is nan but must be {DEADLINE}"),
    ("deadline_ms", float("inf"), f"deadline_ms is inf but must be {DEADLINE}"),
    ("deadline_ms", "soon", "deadline_ms is 'soon' but must be a number"),
    ("deadline_ms", False, "deadline_ms is False but must be a number"),
    ("tenant", 5, "tenant is 5 but must be a string"),
    ("tenant", "x" * 257, "tenant has 257 characters but must have at most 256"),
    ("cache_salt", ["a"], "cache_salt is ['a'] but must be a string"),
    ("cache_salt", "x" * 10**6, "cache_salt has 1,000,000 characters but must have at most 256"),
]


def _names(cases):
    return [f"{key}-{index}" for index, (key, *_) in enumerate(cases)]


@pytest.mark.parametrize(("key", "given", "read"), GOOD, ids=_names(GOOD))
def test_a_good_value_is_read(key, given, read):
    params = SchedulingParams.from_mapping({key: given})
    assert getattr(params, key) == read
    assert type(getattr(params, key)) is type(read)
    assert params == SchedulingParams(**{key: given})


@pytest.mark.parametrize(("key", "given", "message"), BAD, ids=_names(BAD))
def test_a_bad_value_is_refused_with_what_is_allowed(key, given, message):
    for make in (SchedulingParams.from_mapping, lambda values: SchedulingParams(**values)):
        with pytest.raises(InvalidRequest) as caught:
            make({key: given})
        assert str(caught.value) == message


def test_every_key_has_a_good_and_a_bad_case():
    assert {key for key, *_ in GOOD} == {key for key, *_ in BAD} == set(SCHEDULING_KEYS)


def test_null_means_the_default_and_keys_of_sampling_are_left_out():
    values = {**dict.fromkeys(SCHEDULING_KEYS), "temperature": "wrong"}
    assert SchedulingParams.from_mapping(values) == SchedulingParams()


@pytest.mark.parametrize(
    ("own", "other", "earlier"), [(None, 5.0, 5.0), (3.0, 5.0, 3.0), (7.0, 5.0, 5.0)]
)
def test_of_two_deadlines_the_earlier_counts(own, other, earlier):
    params = SchedulingParams(priority=4, deadline_ms=own)
    assert params.at_the_latest(other) == SchedulingParams(priority=4, deadline_ms=earlier)


def test_a_protocols_longest_time_is_no_error():
    assert SchedulingParams().at_the_latest((2**64 - 1) / 1000).deadline_ms == 1e12


def test_a_deadline_counts_from_arrival():
    assert SchedulingParams(deadline_ms=250).deadline_s(10.0) == 10.25
    assert SchedulingParams().deadline_s(10.0) is None


def test_parameters_are_frozen_and_cross_processes():
    params = SchedulingParams(tenant="a", deadline_ms=5)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(FrozenInstanceError):
        params.tenant = "b"


def test_every_key_is_documented():
    body = ast.parse(inspect.getsource(scheduling_params.SchedulingParams)).body[0].body
    pairs = [(a, b) for a, b in pairwise(body) if isinstance(a, ast.AnnAssign)]
    assert len(pairs) == len(fields(SchedulingParams))
    assert all(len(b.value.value) > 20 for _, b in pairs)
