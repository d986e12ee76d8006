"""The check of a GPU runs without one as far as it goes, at tiny sizes, by the same code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.context import Context
from gpu.report import Verdict

from gpu import check, correctness, parts

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
CPU = Context(torch.device("cpu"), quick=True)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as on a machine where octavo is not installed, without a GPU."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Everything, by one command."""
    path = tmp_path_factory.mktemp("report") / "gpu.md"
    done = run("--device", "cpu", "--quick", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_text() == done.stdout
    return done.stdout


def tables(report: str) -> dict[str, list[list[str]]]:
    """Return the cells of each section's table by its title, heads first."""
    found = {}
    for section in re.split(r"^#+ ", report, flags=re.MULTILINE)[1:]:
        rows = [line for line in section.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        found[section.splitlines()[0]] = [cells[0], *cells[2:]]
    return found


def test_every_part_ends_well_on_a_cpu(report):
    rows = tables(report)["What a GPU does"]
    assert [row[:2] for row in rows[1:]] == [[name, "all met"] for name in parts.PARTS]


def test_the_report_says_when_where_and_with_what_it_was_made(report):
    assert re.search(
        r"^Made by `scripts/gpu-check` on \d{4}-\d\d-\d\d on a CPU, at tiny sizes, in \d+ s: "
        r"Python 3\.\d+\.\d+, torch \S+, triton .+, transformers \S+\.$",
        report,
        re.MULTILINE,
    )


def test_every_section_is_a_table_of_equally_long_rows(report):
    found = tables(report)
    assert len(found) == 14
    for title, rows in found.items():
        assert len(rows) > 1, title
        assert {len(row) for row in rows} == {len(rows[0])}, title


def test_the_tables_hold_what_was_promised_to_be_measured(report):
    found = tables(report)
    assert found["Decode attention"][0] == [
        *("context", "batch", "query heads a KV head", "µs", "GB/s", "of a copy")
    ]
    assert found["Decode steps"][0] == [
        *("products", "batch", "step, ms", "tokens/s", "floor, ms", "floor's share"),
        *("forward, ms", "gap"),
    ]
    axes = {row[1] for row in found["Engine: the same tokens and log-probabilities"][1:]}
    assert {"all in one batch", "prompts in chunks", "preempted, swapped"} <= axes
    ranks = {(row[0], row[1]): row[2] for row in found["Ranks: answers, bytes and a lost rank"][1:]}
    assert ranks["tp 2", "tokens of one device"] == "0 of 3 differ"
    assert ranks["tp 2", "bytes that rank 0 sends"] == "93,440, 93,440 by the formula"
    assert ranks["tp 2 x pp 2", "everything"].startswith("skipped: needs 4 processes, with which")
    share = found["Decode attention"][1][-1]
    assert re.fullmatch(r"\d+%", share)


def test_a_machine_without_a_gpu_is_told_so():
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check needs a CUDA GPU, and this machine has none; --device")


def test_an_unknown_part_is_refused():
    done = run("--only", "kernels,nothing")
    assert done.returncode == 2
    assert "'nothing' is none of kernels, determinism, equality" in done.stderr


def test_a_part_that_fails_is_reported_with_its_last_words_and_stops_no_other():
    # A bad value of the switch makes every operation fail, and the bus has none.
    done = run("--device", "cpu", "--quick", "--only", "kernels,swap", OCTAVO_KERNELS="nonsense")
    assert done.returncode == 1
    rows = tables(done.stdout)["What a GPU does"]
    assert rows[1][1].startswith("FAILED: status 1: ValueError: OCTAVO_KERNELS is 'nonsense'")
    assert rows[2][0] == "swap"


def test_parts_for_which_no_time_is_left_fail(capsys):
    assert check.main(["--device", "cpu", "--only", "swap", "--minutes", "0.01"]) == 1
    assert "| swap | FAILED: no time was left | 0 |" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_stopped(monkeypatch):
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert check._wait_for(command, 2.0) == "not done after 2 s: begun"


def test_a_wrong_result_is_not_met():
    operation = correctness.row_operations()[0]
    wrong = correctness.RowOperation(
        operation.name,
        operation.draw,
        lambda x, weight: operation.compute(x, weight) * 1.1,
        operation.reference,
    )
    assert correctness._row_line(wrong, CPU).verdict == Verdict.MISSED
    spoiled = correctness.RowOperation(
        operation.name,
        operation.draw,
        lambda x, weight: operation.compute(x, weight) * torch.nan,
        operation.reference,
    )
    assert correctness._row_line(spoiled, CPU).cells[-1] == "inf"


def test_what_pytest_prints_becomes_a_line_a_file(monkeypatch):
    printed = (
        "PASSED on_device/check_gated.py::test_a\nPASSED on_device/check_gated.py::test_b\n"
        "FAILED on_device/check_rms_norm.py::test_c - AssertionError\n"
    )
    monkeypatch.setattr(correctness, "_run_pytest", lambda context: printed)
    section = correctness._pytest_section(CPU)
    found = {line.cells[0]: (line.cells[1], line.verdict) for line in section.lines}
    assert found["check_gated.py"] == ("2 passed", Verdict.MET)
    assert found["check_rms_norm.py"] == ("1 failed", Verdict.MISSED)
    assert found["check_offsets.py"] == ("did not run", Verdict.MISSED)
    assert section.notes == ("FAILED on_device/check_rms_norm.py::test_c - AssertionError",)


def test_without_pytest_it_is_said_which_checks_did_not_run(monkeypatch):
    monkeypatch.setattr(correctness.importlib.util, "find_spec", lambda name: None)
    section = correctness._pytest_section(CPU)
    assert section.lines == ()
    assert section.notes[0].startswith("pytest is not installed, which these checks need")


def test_what_there_was_no_time_for_is_not_met():
    late = Context(torch.device("cpu"), deadline_s=0.0)
    for name in ("attention", "steps"):
        lines = [line for section in parts.run_part(name, late) for line in section.lines]
        assert lines
        assert {(line.cells[-1], line.verdict) for line in lines} == {
            ("out of time", Verdict.MISSED)
        }


def test_one_gpu_skips_what_takes_several(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    context = Context(torch.device("cuda"))
    sections = list(parts.run_part("ranks", context))
    assert [len(section.lines) for section in sections] == [1, 3, 1]
    for section in sections:
        assert section.num_missed == 0
        for line in section.lines:
            assert any("GPUs of which there are 1" in cell for cell in line.cells)
