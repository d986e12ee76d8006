"""The soak of `benchmarks/soak` in a minute: what it counts must hold also on a busy machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
#: The engine is killed at 20 s and at 40 s; the model is unloaded and loaded at 30 s. A stub counts
#: as warm when it has surely loaded it.
FORM = "--minutes 1 --kill-every 20 --reloads 1 --capacity-s 6 --warm-up-s 12".split()


def test_soak_of_a_minute_keeps_every_promise_that_is_counted(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    result = tmp_path / "soak.json"
    arguments = ["--model", str(tiny_checkpoint), "--json", str(result)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *FORM, *arguments],
        cwd=ROOT,
        env={**os.environ, "OCTAVO_CPU_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.exists(), run.stderr
    soak = json.loads(result.read_text())
    kinds = [outage["kind"] for outage in soak["outages"]]
    assert kinds == ["kill -9 of the engine", "unload and load", "kill -9 of the engine"]
    broken = [
        promise for promise in soak["promises"] if promise["is_counted"] and not promise["is_kept"]
    ]
    assert broken == []
