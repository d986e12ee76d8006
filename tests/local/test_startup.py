"""A start has stalled when Triton alone keeps its models waiting, and never while one may load."""

from __future__ import annotations

import logging

import pytest

from octavo.local.server_log import LogRecord
from octavo.local.startup import StartupProgress

READY = "model ready in 1.7 s: LlamaForCausalLM, attention native (avx512-bf16)"


def after(*messages: str) -> StartupProgress:
    """Return the progress after these lines, read one a second from second 1 on."""
    progress = StartupProgress()
    for second, message in enumerate(messages, start=1):
        ours = message.startswith("model ready")
        progress.observe(LogRecord("", logging.INFO, message, ours), float(second))
    return progress


def test_time_counts_from_the_model_that_was_ready_last() -> None:
    assert after("loading: a:1", READY).stalled_s(12.0) == 10.0
    assert after("loading: a:1", "loading: b:1", READY, READY).stalled_s(12.0) == 8.0


@pytest.mark.parametrize(
    "messages",
    [
        (),
        ("loading: a:1",),
        ("loading: a:1", "loading: b:1", READY),
        ("loading: a:1", READY, "successfully loaded 'a'"),
        ("loading: a:1", "loading: b:1", READY, "successfully loaded 'a'"),
        ("loading: a:1", "failed to load 'a' version 1: Internal: no such file"),
    ],
)
def test_no_stall_while_a_model_may_be_loading_or_when_all_are_loaded(
    messages: tuple[str, ...],
) -> None:
    assert after(*messages).stalled_s(1000.0) == 0.0


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((), "it is starting"),
        (("loading: b:1", "loading: a:1"), "it is loading a, b"),
        (("loading: a:1", READY), "a is ready, but Triton has not taken notice"),
    ],
)
def test_progress_is_told_in_words(messages: tuple[str, ...], words: str) -> None:
    assert after(*messages).describe() == words
