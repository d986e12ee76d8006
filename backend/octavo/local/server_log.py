"""Turns the lines of server, stubs and engine into records of one form: time, level, message.

Triton writes glog lines with escaped text, and tables; Octavo's own processes write lines of
Python's logging with a level and a message. Knows nothing of processes: a line goes in, a record
comes out.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

_LEVELS = {
    "V": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}
# I1129 17:05:12.123456 4242 server.cc:604] "message"
_TRITON = re.compile(r"^([VIWEF])\d{4} [\d:.]+ +\d+ ([^:\s]+):\d+\] (.*)$")
# 17:05:12.123 INFO message; a date before and a logger's name after are allowed
_OURS = re.compile(
    r"^[\d-]*[ T]?\d\d:\d\d:\d\d[.,]?\d* +(DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)$"
)
# One object a line, where the option log_format says so.
_OURS_AS_JSON = '{"time": "'
_FAILED_LOAD = re.compile(r"^failed to load '([^']+)' version \d+: (?:\w+: )?(.+)")
# Raised on purpose: its message says it all, and where in our code it was raised is of no use.
_KNOWN_ERROR = re.compile(r"^(failed to load .*?: )\w+: ConfigError: (.*?)(\s*\n\nAt:\n.*)?$", re.S)
# Where in a config.pbtxt its reader stumbled; the next line names the file.
_PROTOBUF = re.compile(r"^\[libprotobuf (WARNING|ERROR|FATAL) [^\]]+\] (.*)$")
# Tables, the help that follows a mistaken flag, and the stack of a crash.
_LAYOUT = re.compile(r"^(\s*$| *\d+# |[+|\t]|  --|Usage: tritonserver|[A-Z][A-Za-z/ ]*:$)")
# What a machine without a GPU always says, and what the next line or our own last line repeats.
_NOISE = (
    "Unable to allocate pinned system memory",
    "CudaDriverHelper has not been initialized",
    "ERROR: Failed to create instance",
    "Signal (",
    "error: creating server",
    "failed to stop server: Internal - Exit timeout expired",
)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line of the log."""

    time: str
    level: int
    message: str
    ours: bool
    """Written by Octavo's own code rather than by Triton."""

    def __str__(self) -> str:
        """Return the record in the form every line of `octavo serve` has."""
        return f"{self.time} {logging.getLevelName(self.level):<7} {self.message}"

    @property
    def is_failed_load(self) -> bool:
        """Whether it says why a model could not be loaded."""
        return _FAILED_LOAD.match(self.message) is not None

    def is_shown_at(self, level: int) -> bool:
        """Return whether a user who asks for `level` sees the record.

        Of Triton's own lines only warnings and errors are shown, unless DEBUG asks for all.
        """
        floor = level if self.ours or level <= logging.DEBUG else max(level, logging.WARNING)
        return self.level >= floor


def parse_line(line: str) -> LogRecord:
    """Return the record that `line` is; one of neither form is taken as our own output."""
    now = _clock()
    if match := _TRITON.match(line):
        letter, source, text = match.groups()
        message = _KNOWN_ERROR.sub(r"\1\2", _unescape(text))
        level = logging.DEBUG if message.startswith(_NOISE) else _LEVELS[letter]
        return LogRecord(now, level, message, ours=source.endswith(".py"))
    if match := _OURS.match(line):
        name, message = match.groups()
        return LogRecord(now, logging.getLevelNamesMapping()[name], message, ours=True)
    if line.startswith(_OURS_AS_JSON):
        return _from_json(line)
    if match := _PROTOBUF.match(line):
        name, message = match.groups()
        return LogRecord(now, logging.getLevelNamesMapping()[name], message, ours=False)
    if _LAYOUT.match(line) or line.startswith(_NOISE):
        return LogRecord(now, logging.DEBUG, line, ours=False)
    level = logging.ERROR if "tritonserver: " in line else logging.INFO
    return LogRecord(now, level, line, ours=True)


def _from_json(line: str) -> LogRecord:
    try:
        fields = json.loads(line)
        level = logging.getLevelNamesMapping()[fields["level"]]
        message = "\n".join(filter(None, [fields["message"], fields.get("exception")]))
    except (ValueError, KeyError, TypeError):
        return LogRecord(_clock(), logging.INFO, line, ours=True)
    return LogRecord(_clock(), level, message, ours=True)


def own_record(level: int, message: str) -> LogRecord:
    """Return a record of now, for what the launcher itself has to say."""
    return LogRecord(_clock(), level, message, ours=True)


def reason_in(records: Iterable[LogRecord]) -> str:
    """Return why a server failed: the model that did not load, else the last error or line."""
    reason, rank = "it wrote no log", -1
    for record in records:
        if match := _FAILED_LOAD.match(record.message):
            return f"model {match[1]!r} cannot be loaded: {match[2]}"
        if record.level >= rank or record.level >= logging.ERROR:
            reason, rank = record.message, record.level
    return reason


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S.%f")[:-3]


def _unescape(text: str) -> str:
    """Return Triton's quoted text as it was before quoting, without its trailing blank lines."""
    try:
        return str(json.loads(text, strict=False)).rstrip() if text.startswith('"') else text
    except ValueError:
        return text.strip('"')
