"""The log of a rank elsewhere is in the log of rank zero's process, with its name."""

from __future__ import annotations

import io
import json
import logging
from multiprocessing import Pipe

from octavo.executor.parallel.rank_log import LogStream, relay_log
from octavo.process_log import JsonFormatter


def logged(level: int, text: str, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("octavo.model", level, "file", 1, text, (), exc_info)
    record.process = 4321
    return record


def relay(*records: logging.LogRecord) -> None:
    ours, theirs = Pipe()
    stream, formatter = LogStream(theirs), JsonFormatter("rank 1 on 10.0.0.2")
    for record in records:
        stream.write(formatter.format(record) + "\n")
        stream.flush()
    theirs.close()
    relay_log(ours)


def test_lines_come_with_level_logger_and_the_name_of_the_rank(caplog):
    caplog.set_level(logging.INFO)
    relay(logged(logging.INFO, "100 % loaded"), logged(logging.ERROR, "ends", OSError("disk")))
    first, second = caplog.records
    assert (first.name, first.levelname) == ("octavo.model", "INFO")
    assert first.getMessage() == "rank 1 on 10.0.0.2: 100 % loaded"
    assert second.levelname == "ERROR"
    assert second.getMessage() == "rank 1 on 10.0.0.2: ends\nOSError: disk"


def test_json_lines_keep_the_time_and_the_process_of_the_rank():
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonFormatter("engine"))
    logging.getLogger("octavo.model").addHandler(handler)
    record = logged(logging.WARNING, "slow")
    record.created = 0.0
    relay(record)
    logging.getLogger("octavo.model").removeHandler(handler)
    line = json.loads(handler.stream.getvalue())
    assert line == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "WARNING",
        "logger": "octavo.model",
        "process": "rank 1 on 10.0.0.2",
        "pid": 4321,
        "message": "rank 1 on 10.0.0.2: slow",
    }
