"""Environments of the peers: one folder each under `build/peers`, made once from PyPI.

A stamp written last says what a folder was made from; any change to that makes it again. Knows no
peer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.side import Unavailable

FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
STAMP = "finished.stamp"
TIMEOUT_S = 3600
_LIST_VERSIONS = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of its own for one peer."""

    name: str
    requirements: tuple[str, ...]
    """What pip installs, pinned."""
    shown: tuple[str, ...]
    """Packages whose versions the report names."""
    removed: tuple[str, ...] = ()
    """What comes along, is not needed for text, and would break."""

    @property
    def folder(self) -> Path:
        """Return where everything of this peer lies."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self.folder / "venv" / "bin" / "python"

    def install(self) -> Mapping[str, str]:
        """Make the environment unless it is there; return the shown versions.

        Raises:
            Unavailable: pip failed.
        """
        made_from = "\n".join((sys.version, *self.requirements, *self.removed))
        make_once(self.folder / "venv", made_from, self._make)
        listed = subprocess.run(
            [self.python, "-I", "-c", _LIST_VERSIONS], capture_output=True, text=True, check=True
        )
        versions = json.loads(listed.stdout)
        return {package: versions[package] for package in self.shown}

    def _make(self, folder: Path) -> None:
        log = self.folder / "install.log"
        run([sys.executable, "-m", "venv", str(folder)], log)
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--no-compile"]
        run([*pip, "--progress-bar", "off", *self.requirements], log)
        if self.removed:
            run([str(self.python), "-m", "pip", "uninstall", "--yes", *self.removed], log)


def make_once(folder: Path, made_from: str, make: Callable[[Path], None]) -> None:
    """Make a folder unless its stamp says that it was made from the same; what is left is removed.

    Raises whatever `make` raises; the next call then begins anew.
    """
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(folder)
    stamp.write_text(made_from)


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command with its output at the end of a log.

    Raises:
        Unavailable: it is missing, failed, or took longer than `TIMEOUT_S`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                timeout=TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            program = Path(command[0]).name
            raise Unavailable(f"{program} failed: {_reason(error, log)}; see {log}") from error


def last_lines(log: Path, count: int = 3) -> str:
    """Return the end of a log, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-count:])


def _reason(error: Exception, log: Path) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return last_lines(log)
    return str(error)
