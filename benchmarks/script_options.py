"""What options of the scripts take, refused before anything is measured: numbers, and places.

Knows no measurement.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from tempfile import TemporaryFile

import click

COUNT = click.IntRange(min=1)
QUICK_HELP = "Few requests and short answers, to try it out; such figures compare with no others."
QUICK_NOTE = "A quick try: no figure below is a claim."


class Amount(click.FloatRange):
    """A finite number, by default above zero."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__(min=0, min_open=not zero)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse and check; no bound refuses what is not a number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite", param, ctx)
        return number


class Counts(click.ParamType[list[int]]):
    """Numbers from 1 on, separated by commas."""

    name = "counts"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Split and check."""
        return [COUNT.convert(each, param, ctx) for each in value.split(",")]


class OutputFile(click.ParamType[Path]):
    """A file that will be written; its folder is made."""

    name = "file"

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Make the folder and see whether the file can be written; a file there stays as it is."""
        path = Path(value)
        try:
            if path.exists():
                if path.is_dir() or not os.access(path, os.W_OK):
                    self.fail(f"{str(path)!r} is no file that can be written", param, ctx)
            else:
                _make_folder(path.parent)
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written: {error}", param, ctx)
        return path


class OutputFolder(click.ParamType[Path]):
    """A folder that will be written to; it is made."""

    name = "folder"

    def __init__(self, page: str | None = None) -> None:
        self._page = page

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Make the folder; where a page is written into, it must be there."""
        path = Path(value)
        if self._page is not None and not (path / self._page).is_file():
            self.fail(f"{str(path)!r} has no {self._page} to write tables into", param, ctx)
        try:
            _make_folder(path)
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written to: {error}", param, ctx)
        return path


def refuse_quick_docs(quick: bool, docs: Path | None) -> None:
    """Refuse to write quick figures over those that the documentation claims."""
    if quick and docs is not None:
        raise click.UsageError(
            "--docs writes figures that are claims, and those of --quick are none"
        )


def _make_folder(path: Path) -> None:
    """Make a folder and see whether a file can be made in it."""
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path):
        pass
