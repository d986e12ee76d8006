"""Launch configurations are chosen from measured times, whoever measures them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton language is not installed")

from gpu.tune import main, tune
from gpu.tuned_tables import TABLES
from gpu.tuning import LEAST_GAIN, Choice, Entry, candidates, choose, table_text

from octavo_kernels._launch import COMPILED_ARCHITECTURES

pytestmark = pytest.mark.kernels

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune-kernels"


@dataclass(frozen=True)
class Config:
    size: int
    warps: int


ENTRY = Entry("all", Config(4, 2), {"size": (2, 4, 8), "warps": (1, 2)}, lambda x: x.size < 9)


def every_table(architecture):
    return [tunable for make in TABLES.values() for tunable in make(architecture)]


def test_candidates_differ_in_one_field_and_are_valid():
    entry = Entry("", Config(4, 2), {"size": (2, 4, 8), "warps": (1, 2)}, lambda x: x.size != 8)
    assert list(candidates(entry, entry.current)) == [Config(2, 2), Config(4, 1)]


def test_the_fastest_is_reached_field_by_field():
    times_s = {(8, 2): 0.5, (8, 1): 0.25}
    choice = choose(ENTRY, lambda config: [times_s.get((config.size, config.warps), 1.0)])
    assert choice.best == Config(8, 1)
    assert choice.gain == pytest.approx(4.0)
    assert choice.num_measured == 6


def test_no_workload_outweighs_another_and_noise_replaces_nothing():
    def measure(config):
        if config.size == 8:  # a tenth of a long workload, for three times the short one
            return [0.9, 3e-6]
        return [1.0 / (LEAST_GAIN - 0.01) if config.size == 2 else 1.0, 1e-6]

    assert choose(ENTRY, measure).best == ENTRY.current


def test_what_cannot_be_launched_is_never_chosen():
    choice = choose(ENTRY, lambda config: None if config.size == 8 else [float(config.size)])
    assert choice.best.size == 2
    with pytest.raises(ValueError, match=r"all: Config\(size=4, warps=2\) cannot be launched"):
        choose(ENTRY, lambda config: None)


def test_the_table_is_python_that_says_how_it_came():
    choices = [Choice(ENTRY, ENTRY.current, 1.0, 4), Choice(ENTRY, Config(8, 1), 1.5, 6)]
    assert table_text("_launch._X", 90, choices, "a GPU").splitlines() == [
        "# _launch._X, measured on a GPU.",
        "90: (",
        "    # all: as before, of 4 measured",
        "    Config(size=4, warps=2),",
        "    # all: x1.50, of 6 measured",
        "    Config(size=8, warps=1),",
        "),",
    ]
    assert table_text("_launch._X", "gfx942", [], "a GPU").splitlines()[1] == "'gfx942': ("


@pytest.mark.parametrize("architecture", COMPILED_ARCHITECTURES)
def test_every_entry_of_every_table_can_be_tuned(architecture):
    for tunable in every_table(architecture):
        entry = tunable.entry
        assert entry.is_valid(entry.current)
        found = list(candidates(entry, entry.current))
        assert len(found) >= 3
        for config in (entry.current, *found):
            cases = tunable.cases(config)
            assert cases
            if hasattr(config, "num_warps"):
                assert {case.num_warps for case in cases} == {config.num_warps}


def test_a_run_prints_each_table_that_is_asked_for(capsys):
    def make_measure(tunable):
        return lambda config: [1.0, 1.0] if config == tunable.entry.current else [2.0, 1.0]

    tune(["_launch._GATED", "_attention_launch._HALF"], 90, "a GPU, today", make_measure)
    printed = capsys.readouterr()
    assert printed.out.count("as before") == 4
    assert "# _attention_launch._HALF, measured on a GPU, today." in printed.out
    assert "AttentionConfig(rows=64, tile=64, split=512, num_warps=4" in printed.out
    assert "_attention_launch._HALF, heads of 256: 0 s" in printed.err


def test_an_unknown_table_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["_launch._NONE"])
    assert (
        "there is no table '_launch._NONE'; there are _launch._RMS_NORM" in capsys.readouterr().err
    )


def test_a_machine_without_a_gpu_is_told_so():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "tune-kernels measures on a CUDA GPU, and this machine has none\n"
