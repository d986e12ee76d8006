"""What `import octavo` offers."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

import octavo


def test_the_exported_names_are_these():
    assert octavo.__all__ == [
        "LLM",
        "Completion",
        "EngineConfig",
        "SamplingParams",
        "SchedulingParams",
        "__version__",
    ]


def test_each_exported_name_is_where_it_is_documented_to_be():
    assert octavo.LLM.__module__ == octavo.Completion.__module__ == "octavo.llm"
    assert octavo.EngineConfig.__module__ == "octavo.config"
    assert octavo.SamplingParams.__module__ == "octavo.sampling_params"
    assert octavo.SchedulingParams.__module__ == "octavo.scheduling_params"


def test_the_version_is_the_distributions():
    assert re.fullmatch(r"\d+\.\d+\.\d+", octavo.__version__)
    assert metadata.version("octavo") == octavo.__version__


def test_any_other_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'octavo' has no attribute 'Engine'$"):
        octavo.Engine  # noqa: B018 - the access is the test
