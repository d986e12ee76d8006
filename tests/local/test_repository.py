"""A folder that is no model repository is refused before a server is started on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.local.bundle import write_repository
from octavo.local.repository import check_repository
from octavo.local.triton_server import TritonServer

FORM = "a repository holds NAME/config.pbtxt and NAME/1/engine.json for each model"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_repository(folder, {"model": "demo"})
    return folder


def is_refused(folder: Path, message: str, loads_all: bool = True) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_repository(folder, loads_all)


def test_a_repository_of_models_is_taken_whatever_else_lies_in_it(repository: Path) -> None:
    (repository / "README.md").touch()
    (repository / ".git").mkdir()
    check_repository(repository, loads_all=True)


def test_one_that_is_not_there_or_no_folder_is_named(tmp_path: Path) -> None:
    absent, file = tmp_path / "absent", tmp_path / "file"
    file.touch()
    is_refused(absent, f"{absent} cannot be read: No such file or directory")
    is_refused(file, f"{file} cannot be read: Not a directory")


def test_an_empty_one_is_refused_unless_models_may_come_later(tmp_path: Path) -> None:
    is_refused(tmp_path, f"model repository {tmp_path} holds no model; {FORM}")
    check_repository(tmp_path, loads_all=False)


def test_a_model_without_a_version_is_named(repository: Path) -> None:
    model = repository / "octavo"
    (model / "1").rename(model / "v1")
    message = f"model 'octavo' in {repository} has no version; make the folder {model / '1'}"
    is_refused(repository, message)
    check_repository(repository, loads_all=False)


@pytest.mark.parametrize("loads_all", [True, False])
def test_what_is_something_else_is_told_apart(
    repository: Path, tmp_path: Path, loads_all: bool
) -> None:
    model = repository / "octavo"
    is_refused(
        model,
        f"{model} is the folder of one model but must be the one around it; name {repository}",
        loads_all,
    )
    (tmp_path / "config.json").touch()
    message = f"{tmp_path} is a checkpoint; name it by --model, for {FORM}"
    is_refused(tmp_path, message, loads_all)


def test_a_server_is_not_started_on_one(
    make_server: Callable[..., TritonServer], tmp_path: Path, runtimes: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        make_server(repository=empty).start()
    assert list(runtimes.iterdir()) == []
