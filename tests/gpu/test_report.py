"""A report says what was found, and the exit status what it comes to."""

import pytest
from doc_tables import markdown_table
from gpu.report import (
    Line,
    PartResult,
    Section,
    Verdict,
    exit_status,
    report_markdown,
)

pytestmark = pytest.mark.kernels


def section(*verdicts: Verdict, is_speed: bool = False) -> Section:
    lines = tuple(Line((str(i), "x"), verdict) for i, verdict in enumerate(verdicts))
    return Section("Title", ("a", "b"), lines, ("A note.",), is_speed)


def test_a_section_is_a_heading_notes_and_a_table_with_verdicts():
    assert section(Verdict.MET, Verdict.MISSED, Verdict.NONE).to_markdown() == (
        "## Title\n\nA note.\n\n"
        "| a | b |  |\n| --- | --- | --- |\n"
        "| 0 | x | met |\n| 1 | x | NOT MET |\n| 2 | x |  |\n"
    )


def test_a_section_that_promises_nothing_has_no_verdicts():
    assert section(Verdict.NONE).to_markdown().endswith(markdown_table(("a", "b"), [("0", "x")]))


def test_a_section_survives_the_way_between_processes():
    original = section(Verdict.MET, Verdict.MISSED, is_speed=True)
    assert Section.from_json(original.to_json()) == original


GOOD = PartResult("good", 1.2, (section(Verdict.MET, Verdict.NONE),))
SLOW = PartResult("slow", 1.2, (section(Verdict.MISSED, is_speed=True),))
WRONG = PartResult("wrong", 1.2, (section(Verdict.MISSED, Verdict.MISSED),))
DEAD = PartResult("dead", 3.0, (section(Verdict.MET),), failure="status 1: a | b")


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([], 0),
        ([GOOD], 0),
        ([GOOD, SLOW], 3),
        ([GOOD, SLOW, WRONG], 1),
        ([WRONG], 1),
        ([SLOW, DEAD], 1),
    ],
)
def test_the_status_tells_wrong_results_from_missed_speed(results, status):
    assert exit_status(results) == status


def test_the_report_begins_with_what_each_part_came_to():
    report = report_markdown("What", "Made today.", [GOOD, WRONG, DEAD])
    assert report.startswith(
        "# What\n\nMade today.\n\n| part |  | seconds |\n| --- | --- | --- |\n"
        "| good | all met | 1 |\n| wrong | 2 NOT MET | 1 |\n"
        "| dead | FAILED: status 1: a / b | 3 |\n\n## Title\n"
    )
    assert report.count("## Title") == 3
