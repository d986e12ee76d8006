"""Lines of every origin become records of one form."""

from __future__ import annotations

import logging

import pytest

from octavo.local.server_log import LogRecord, parse_line, reason_in

JSON = '{"time": "2026-11-29T17:33:01.339Z",'
STAMP = "I1129 17:33:01.339000 4242"


@pytest.mark.parametrize(
    ("line", "level", "message", "ours"),
    [
        (f'{STAMP} server.cc:604] "loading: echo:1"', logging.INFO, "loading: echo:1", False),
        (f'{STAMP} model.py:12] "blocks: 220"', logging.INFO, "blocks: 220", True),
        (f"{STAMP} model.cc:1] plain", logging.INFO, "plain", False),
        ('W1129 17:33:01.3 1 a.cc:1] "slow \\"x\\""', logging.WARNING, 'slow "x"', False),
        (
            'E1129 17:33:01.3 1 a.cc:1] "bad\\n\\nAt:\\n  f\\n"',
            logging.ERROR,
            "bad\n\nAt:\n  f",
            False,
        ),
        ("17:33:01.339 INFO engine is up", logging.INFO, "engine is up", True),
        ("2026-11-29 17:33:01,339 WARNING    low", logging.WARNING, "low", True),
        (f'{JSON} "level": "WARNING", "message": "low"}}', logging.WARNING, "low", True),
        (
            f'{JSON} "level": "ERROR", "message": "bad", "exception": "At:\\n  f"}}',
            logging.ERROR,
            "bad\nAt:\n  f",
            True,
        ),
        (f"{JSON} no JSON", logging.INFO, f"{JSON} no JSON", True),
        (
            "[libprotobuf ERROR /deps/text_format.cc:337] Error parsing ModelConfig: 1:17: what.",
            logging.ERROR,
            "Error parsing ModelConfig: 1:17: what.",
            False,
        ),
        ("Traceback (most recent call last):", logging.INFO, None, True),
        ("tritonserver: unrecognized option '--x'", logging.ERROR, None, True),
        ("+-----+", logging.DEBUG, None, False),
        ("| echo | 1 |", logging.DEBUG, None, False),
        ("", logging.DEBUG, None, False),
        (" 0# 0x000055D860B7152D in /opt/bin/tritonserver", logging.DEBUG, None, False),
        ("\tPrint usage", logging.DEBUG, None, False),
        ("Signal (15) received.", logging.DEBUG, None, False),
        ('E1129 1:1 1 cuda.cc:1] "CudaDriverHelper has not been initialized."', 10, None, False),
    ],
)
def test_line_becomes_a_record(line: str, level: int, message: str | None, ours: bool) -> None:
    record = parse_line(line)
    assert (record.level, record.ours) == (level, ours)
    assert message is None or record.message == message


def test_record_is_time_level_message() -> None:
    record = LogRecord("17:33:01.339", logging.INFO, "engine is up", ours=True)
    assert str(record) == "17:33:01.339 INFO    engine is up"


@pytest.mark.parametrize(
    ("asked", "ours", "shown_from"),
    [
        (logging.INFO, True, logging.INFO),
        (logging.INFO, False, logging.WARNING),
        (logging.ERROR, True, logging.ERROR),
        (logging.ERROR, False, logging.ERROR),
        (logging.DEBUG, False, logging.DEBUG),
    ],
)
def test_tritons_own_lines_show_from_warning_on(asked: int, ours: bool, shown_from: int) -> None:
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
    shown = [level for level in levels if LogRecord("", level, "", ours).is_shown_at(asked)]
    assert shown[0] == shown_from


def test_reason_is_the_model_that_failed_to_load() -> None:
    lines = [
        "E1129 17:33:01.3 1 m.cc:1] "
        "\"failed to load 'm' version 1: Internal: no such file\\n\\nAt:\"",
        'E1129 17:33:01.3 1 m.cc:1] "later"',
    ]
    assert reason_in(map(parse_line, lines)) == "model 'm' cannot be loaded: no such file"


def test_reason_is_otherwise_the_last_error_and_without_one_the_last_line() -> None:
    first, error, last = (
        LogRecord("", level, text, ours=True)
        for level, text in ((logging.INFO, "first"), (logging.ERROR, "bad"), (logging.INFO, "last"))
    )
    assert reason_in([first, error, last]) == "bad"
    assert reason_in([first, last]) == "last"
    assert reason_in([]) == "it wrote no log"


def test_a_load_that_failed_on_purpose_is_told_without_frames() -> None:
    text = (
        "failed to load 'm' version 1: Internal: ConfigError: model '/x' does not exist; name "
        "another\\n\\nAt:\\n  /opt/octavo/loader.py(104): load\\n"
    )
    record = parse_line(f'E1129 17:05:12.123456 7 model_lifecycle.cc:642] "{text}"')
    assert record.message == "failed to load 'm' version 1: model '/x' does not exist; name another"
    assert record.is_failed_load
    assert reason_in([record]) == (
        "model 'm' cannot be loaded: model '/x' does not exist; name another"
    )
