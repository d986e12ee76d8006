"""The one Hypothesis profile, and what tests of every folder make requests with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

# Before anything imports transformers: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from octavo.request import Request
from octavo.sampling_params import SamplingParams

# No deadline: on a shared machine a slow example says nothing about the code.
settings.register_profile("octavo", deadline=None, print_blob=True)
settings.load_profile("octavo")


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Make a resolved request: a name, a prompt (ids, or how many), and more.

    The rest are sampling parameters, or fields of the request by their names.
    """
    own_fields = {field.name for field in fields(Request)}

    def make(name: str = "a", prompt: int | Sequence[int] = 5, **values: Any) -> Request:
        ids = range(10, 10 + prompt) if isinstance(prompt, int) else prompt
        own = {key: values.pop(key) for key in own_fields & values.keys()}
        params = SamplingParams(**{"max_tokens": 1000, "seed": 0, **values})
        return Request(name, tuple(ids), params, **own)

    return make
