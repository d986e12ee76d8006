"""What a killed process leaves behind of its children: nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

# A form that takes the trial of a grammar as long as it may.
PARENT = """
from octavo.grammar.probe import probe
from octavo.structured_outputs import StructuredOutputs
print(flush=True)
probe(StructuredOutputs("json", '{"type": "integer", "multipleOf": 99999989}'), 60.0)
"""


def test_the_trial_of_a_grammar_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        process = psutil.Process(parent.pid)
        deadline = time.monotonic() + 10.0
        trials: list[psutil.Process] = []
        while not trials:
            assert time.monotonic() < deadline, "no trial was started"
            trials = [child for child in process.children() if is_trial(child)]
        time.sleep(0.5)  # past its imports, so that it is tied
        (trial,) = trials
        assert trial.is_running()
        parent.kill()
    deadline = time.monotonic() + 1.0
    while not has_ended(trial):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.01)


def is_trial(process: psutil.Process) -> bool:
    try:
        return "octavo.grammar.probe" in process.cmdline()
    except psutil.NoSuchProcess:  # another one, which has ended
        return False


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended; a container without init process never collects it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
