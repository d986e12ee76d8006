"""What a check of a GPU found: sections of lines, each with its verdict, and their Markdown.

Pure text. Knows nothing of what is checked or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from doc_tables import markdown_table


class Verdict(StrEnum):
    """Whether a line is as promised."""

    MET = "met"
    MISSED = "NOT MET"
    NONE = ""
    """Nothing was promised: a measurement for its own sake."""

    @classmethod
    def of(cls, holds: bool) -> Verdict:
        """Return the verdict of a promise."""
        return cls.MET if holds else cls.MISSED


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a section's table."""

    cells: tuple[str, ...]
    verdict: Verdict = Verdict.NONE


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a report."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    is_speed: bool = False
    """Its promises are targets of speed: one that is not met is not a wrong result."""

    @property
    def num_missed(self) -> int:
        """Promises that were not kept."""
        return sum(line.verdict == Verdict.MISSED for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the section that `to_json` wrote."""
        lines = tuple(
            Line(tuple(line["cells"]), Verdict(line["verdict"])) for line in values["lines"]
        )
        return cls(
            values["title"],
            tuple(values["heads"]),
            lines,
            tuple(values["notes"]),
            values["is_speed"],
        )

    def to_markdown(self) -> str:
        """Return the section under a heading of the second level."""
        has_verdicts = any(line.verdict for line in self.lines)
        heads = (*self.heads, "") if has_verdicts else self.heads
        rows = [(*line.cells, line.verdict) if has_verdicts else line.cells for line in self.lines]
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"## {self.title}\n{notes}\n{markdown_table(heads, rows)}"


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part of the check came to."""

    name: str
    seconds: float
    sections: tuple[Section, ...] = ()
    failure: str | None = None
    """Why it did not end by itself."""

    @property
    def verdict(self) -> str:
        """What the report's first table says of it."""
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        missed = sum(section.num_missed for section in self.sections)
        return f"{missed} NOT MET" if missed else "all met"


def unmeasured_line(what: tuple[str, ...], heads: Sequence[str]) -> Line:
    """Return the line of what there was no time to measure, which is not as promised."""
    return Line((*what, *["out of time"] * (len(heads) - len(what))), Verdict.MISSED)


def report_markdown(title: str, circumstances: str, results: Sequence[PartResult]) -> str:
    """Return the whole report.

    Args:
        title: Its heading.
        circumstances: When, where and with what it was made, one paragraph.
        results: Of all parts.
    """
    rows = [
        (result.name, result.verdict.replace("|", "/"), f"{result.seconds:.0f}")
        for result in results
    ]
    pieces = [f"# {title}\n", f"{circumstances}\n", markdown_table(("part", "", "seconds"), rows)]
    pieces += [section.to_markdown() for result in results for section in result.sections]
    return "\n".join(pieces)


def exit_status(results: Sequence[PartResult]) -> int:
    """Return 1 if a result is wrong or a part failed, else 3 if a target of speed is missed."""
    sections = [section for result in results for section in result.sections]
    if any(result.failure is not None for result in results):
        return 1
    if any(section.num_missed for section in sections if not section.is_speed):
        return 1
    return 3 if any(section.num_missed for section in sections) else 0
