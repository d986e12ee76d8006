"""Scripts refuse what they cannot measure, or write, before they measure anything."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from benchmarks.decode_profile import main as decode_profile
from benchmarks.memory import main as memory
from benchmarks.mixed import main as mixed
from benchmarks.peers.__main__ import main as peers
from benchmarks.pipeline import main as pipeline
from benchmarks.scaling import main as scaling
from benchmarks.scheduling import main as scheduling
from benchmarks.script_options import Amount, Counts, OutputFile, OutputFolder
from benchmarks.soak.__main__ import main as soak
from click.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (mixed, "--rounds 0", "0 is not in the range x>=1"),
        (mixed, "--json /proc/none/x.json", "'/proc/none/x.json' cannot be written"),
        (mixed, "--docs /proc/none", "'/proc/none' has no scaling.md to write tables into"),
        (scaling, "--docs /proc/none", "'/proc/none' has no scaling.md to write tables into"),
        (mixed, f"--quick --docs {DOCS}", "--docs writes figures that are claims"),
        (scaling, f"--quick --docs {DOCS}", "--docs writes figures that are claims"),
        (memory, "--requests 0", "0 is not in the range x>=1"),
        (memory, "--requests -3", "-3 is not in the range x>=1"),
        (memory, "--seed -1", "-1 is not in the range x>=0"),
        (memory, "--json /proc", "'/proc' is no file that can be written"),
        (peers, "--rounds 0", "0 is not in the range x>=1"),
        (peers, "--capacity 0", "0.0 is not in the range x>0"),
        (peers, "--capacity -1", "-1.0 is not in the range x>0"),
        (peers, "--capacity nan", "nan is not finite"),
        (peers, "--out /proc/none", "'/proc/none' cannot be written to"),
        (pipeline, "--stages 0", "0 is not in the range x>=1"),
        (scheduling, "--steps 1", "1 is not in the range x>=2"),
        (decode_profile, "--batches 8,0", "0 is not in the range x>=1"),
        (decode_profile, "--context 10", "--context 10 leaves no prompt for --rounds 30"),
        (soak, "--kill-every 0", "0.0 is not in the range x>0"),
        (soak, "--minutes inf", "inf is not finite"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(script, options, message):
    done = CliRunner().invoke(script, options.split())
    assert done.exit_code == 2
    assert message in done.output


def test_an_amount_may_be_zero_where_that_makes_sense():
    assert Amount(zero=True).convert("0", None, None) == 0.0


def test_counts_are_separated_by_commas():
    assert Counts().convert("1,8", None, None) == [1, 8]


def test_the_folder_of_a_file_is_made_and_the_file_is_not(tmp_path):
    path = tmp_path / "new" / "figures.json"
    assert OutputFile().convert(str(path), None, None) == path
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_there_stays_as_it_is(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text("{}")
    OutputFile().convert(str(path), None, None)
    assert path.read_text() == "{}"


def test_a_folder_is_made(tmp_path):
    assert OutputFolder().convert(str(tmp_path / "a" / "b"), None, None).is_dir()


def test_a_folder_of_documentation_must_have_the_page(tmp_path):
    with pytest.raises(click.BadParameter, match=r"has no scaling\.md"):
        OutputFolder("scaling.md").convert(str(tmp_path), None, None)
    assert OutputFolder("scaling.md").convert(DOCS, None, None) == DOCS
