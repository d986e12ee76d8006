from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from benchmarks.peers.environment import make_once, run
from benchmarks.peers.side import Unavailable
from benchmarks.peers.transformers_side import ThisEnvironment


def test_a_folder_is_made_once_and_again_when_what_it_is_made_from_changes(tmp_path):
    folder, made = tmp_path / "folder", []
    for made_from in ("a", "a", "b"):
        make_once(folder, made_from, lambda path: made.append(path))
    assert made == [folder] * 2


def test_a_folder_whose_making_failed_is_made_anew(tmp_path):
    folder = tmp_path / "folder"

    def fail(path):
        (path / "half").touch()
        raise Unavailable("no network")

    with pytest.raises(Unavailable):
        make_once(folder, "a", fail)
    make_once(folder, "a", lambda path: (path / "whole").touch())
    assert sorted(each.name for each in folder.iterdir()) == ["finished.stamp", "whole"]


def test_a_command_that_fails_is_told_of_with_the_end_of_its_output(tmp_path):
    program = "print('a lot'); print('ERROR: no such version'); raise SystemExit(1)"
    with pytest.raises(Unavailable, match="ERROR: no such version"):
        run([sys.executable, "-c", program], tmp_path / "log")
    with pytest.raises(Unavailable, match="nothing-of-this-name"):
        run(["nothing-of-this-name"], tmp_path / "log")


def test_this_interpreter_serves_without_an_installation():
    here = ThisEnvironment()
    assert here.install() == {name: version(name) for name in ("torch", "transformers")}
    assert here.python == Path(sys.executable)
    assert here.folder.is_dir()
