"""Curves over what a server is given: tables, plots, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.curves import Curve, Line, Panel, draw, table_of
from benchmarks.doc_tables import markers, write_table
from benchmarks.queue_curve import CASES, NUM_SEATS, Play
from benchmarks.scaling import CURVES, figures_path, main, write
from click.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "scaling.md"
CURVE = Curve(
    "context",
    "tokens",
    "tokens of context",
    (
        Panel("tokens/s", (Line("speed", ""),)),
        Panel("ms", (Line("first_s", "first", 1e3, 1), Line("later_s", "later", 1e3)), True),
    ),
    lambda quick: POINTS,
)
POINTS = [
    {"tokens": 1024, "speed": 99.6, "first_s": 0.01234, "later_s": 2.5, "foreign_share": 0.01},
    {"tokens": 0, "speed": 7, "first_s": 1, "later_s": 0.001, "foreign_share": 0.2},
]


def test_a_table_has_a_row_a_point_and_a_column_a_line_in_the_unit_of_its_panel():
    assert table_of(CURVE, POINTS) == (
        "| tokens of context | tokens/s | ms, first | ms, later |\n"
        "| --- | --- | --- | --- |\n"
        "| 1,024 | 100 | 12.3 | 2,500 |\n"
        "| 0 | 7 | 1,000.0 | 1 |\n"
    )


def test_points_are_told_as_they_come_and_a_disturbed_one_claims_nothing(monkeypatch):
    monkeypatch.setitem(CURVES, "context", CURVE)
    told = CliRunner().invoke(main, ["--curve", "context"]).output
    assert told == (
        "context: 1,024  100  12.3  2,500\n"
        "context: 0  7  1,000.0  1  NO CLAIM: others took 20% of the CPU\n"
        f"{table_of(CURVE, POINTS)}\n"
    )


def test_a_plot_is_a_picture(tmp_path):
    draw(CURVE, POINTS, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_is_put_in_the_place_of_the_one_before_and_nothing_else_changes(tmp_path):
    page = tmp_path / "page.md"
    begin, end = markers("one")
    other = "".join(markers("other"))
    page.write_text(f"before\n{begin}old{end}\nafter {other}\n")
    write_table(page, "one", "new")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter {other}\n"
    with pytest.raises(ValueError, match="unpack"):
        write_table(page, "missing", "new")


def test_a_curve_is_written_as_figures_a_plot_and_a_table(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "scaling.md").write_text("".join(markers("context")))
    write(CURVE, POINTS, tmp_path)
    assert json.loads(figures_path(CURVE, tmp_path).read_text())["points"] == POINTS
    assert figures_path(CURVE, tmp_path).with_suffix(".png").is_file()
    assert table_of(CURVE, POINTS) in (tmp_path / "scaling.md").read_text()


@pytest.mark.parametrize("name", CURVES)
def test_the_page_shows_the_figures_that_lie_beside_its_plots(name):
    points = json.loads(figures_path(CURVES[name], DOCS).read_text())["points"]
    begin, end = markers(name)
    assert f"{begin}\n{table_of(CURVES[name], points)}\n{end}" in PAGE.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_queue_never_grows_shorter_while_sequences_decode_and_end(case):
    play = Play(case, 20)
    for _ in range(50):
        play.run(1)
        assert len(play.scheduler.waiting) >= 20
    assert len(play.steps_s) == 50
    assert len(play.adds_s) > 10, "nobody ended"
    num_running = len(play.scheduler.running)
    assert num_running < NUM_SEATS if case.key == "memory" else num_running > NUM_SEATS - 10
    play.scheduler.check_integrity()
