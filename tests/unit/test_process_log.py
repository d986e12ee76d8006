"""Lines of the log: their two forms, what they keep back, and that nobody waits for one."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.errors import EngineError, InvalidRequest
from octavo.process_log import JsonFormatter, QueueHandler, TextFormatter, without_text

CANARY = "canary-7531"
Run = Callable[[str, str], list[str]]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Return a logger of its own, whose handlers are closed afterwards."""
    logger = logging.Logger("octavo.test", logging.INFO)
    yield logger
    for handler in logger.handlers:
        handler.close()


@pytest.fixture
def run() -> Run:
    """Return a function that runs a program whose log is set up, and gives the lines it wrote."""

    def call(log_format: str, program: str) -> list[str]:
        opening = f"""
            import logging, sys, threading, warnings
            from octavo.process_log import set_up_logging
            set_up_logging({log_format!r}, "stub")
        """
        code = textwrap.dedent(opening) + textwrap.dedent(program)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == ""
        return done.stderr.splitlines()

    return call


def _failure(error: BaseException) -> BaseException:
    """Return the error as it is after it was raised from another that quotes a prompt."""
    try:
        try:
            raise KeyError(CANARY)
        except KeyError as cause:
            raise error from cause
    except BaseException as raised:
        return raised


def _written(formatter: logging.Formatter, logger: logging.Logger, error: BaseException) -> str:
    stream = io.StringIO()
    handler = QueueHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.error("it failed", exc_info=error)
    handler.close()
    return stream.getvalue()


def test_a_line_of_json_says_when_where_and_what(logger: logging.Logger) -> None:
    error = _failure(EngineError("no block is left"))
    (text,) = _written(JsonFormatter("engine"), logger, error).splitlines()
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert "in _failure" in line["exception"]
    assert line.pop("exception").count("no block is left") == 1
    assert line == {
        "level": "ERROR",
        "logger": "octavo.test",
        "process": "engine",
        "pid": os.getpid(),
        "message": "it failed",
    }


def test_a_line_of_text_is_time_level_and_message_with_the_traceback_below(
    logger: logging.Logger,
) -> None:
    first, *rest = _written(TextFormatter(), logger, EngineError("full")).splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} ERROR it failed", first)
    assert rest == ["EngineError: full"]


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [
        (RuntimeError("CUDA out of memory"), True),
        (OSError("no space left"), True),
        (EngineError("no block is left"), True),
        (InvalidRequest(f"stop is '{CANARY}'"), False),
        (ValueError(f"could not convert string to float: '{CANARY}'"), False),
        (TypeError(f"incompatible arguments: '{CANARY}'"), False),
        (UnicodeEncodeError("utf-8", f"{CANARY}\ud800", 11, 12, "surrogates"), False),
    ],
)
def test_an_exception_says_what_it_has_to_say_only_if_it_cannot_quote_a_request(
    error: Exception, is_shown: bool
) -> None:
    shown = without_text(_failure(error))
    assert CANARY not in shown
    assert type(error).__name__ in shown
    assert (str(error) in shown) is is_shown
    assert "caused by" in shown
    assert "KeyError: (not shown, for it may quote a request)" in shown


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_lines_are_written_before_the_process_ends(run: Run, log_format: str) -> None:
    lines = run(log_format, "for i in range(500): logging.getLogger('x').info('line %d', i)")
    assert len(lines) == 500
    assert "line 499" in lines[-1]


def test_what_other_code_writes_is_json_too(run: Run) -> None:
    program = """
        print("a library's own words", file=sys.stderr)
        warnings.warn("take care")
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start(); thread.join()
        {}["secret"]
    """
    lines = [json.loads(line) for line in run("json", program)]
    assert [(line["level"], line["message"].splitlines()[0][:22]) for line in lines] == [
        ("INFO", "a library's own words"),
        ("WARNING", "<string>:7: UserWarnin"),
        ("ERROR", "thread worker failed"),
        ("CRITICAL", "the process failed"),
    ]
    assert "ZeroDivisionError: division by zero" in lines[2]["exception"]
    assert "secret" not in json.dumps(lines[3]["exception"].splitlines()[-1])


def test_a_process_whose_log_is_set_up_keeps_it(run: Run) -> None:
    program = """
        set_up_logging("json", "engine")
        logging.getLogger("x").info("once")
    """
    (line,) = run("text", program)
    assert line.endswith("INFO once")


def test_nobody_waits_for_a_reader_that_is_behind_and_the_loss_is_told(
    logger: logging.Logger, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader) as lines:
        handler = QueueHandler(stream, max_waiting=1000)
        handler.setFormatter(TextFormatter())
        logger.addHandler(handler)
        began = time.monotonic()
        for _ in range(3000):
            logger.info("x" * 200)
        assert time.monotonic() - began < 5.0
        num_read = 0
        for line in lines:
            num_read += 1
            if "lost" in line:
                break
        match = re.search(r"WARNING (\d+) lines of the log are lost", line)
        assert match is not None
        num_lost = int(match[1])
        assert num_lost > 0
        for _ in range(3000 - num_lost - (num_read - 1)):
            assert "x" * 200 in lines.readline()
        handler.close()
