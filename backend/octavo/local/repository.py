"""Checks a model repository that a user names before a server is started on it.

Only what Triton would pass over, or say in words of its own: what stands in a model's files is for
the server to judge. Knows nothing of processes.
"""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ConfigError

_CONFIG = "config.pbtxt"
_FORM = f"a repository holds NAME/{_CONFIG} and NAME/1/engine.json for each model"


def check_repository(folder: Path, loads_all: bool) -> None:
    """Refuse a folder that is no model repository.

    Args:
        folder: that a user named.
        loads_all: whether every model in it is to be loaded; else it may get models later.

    Raises:
        ConfigError: it cannot be read, is something else, or has no model that could be loaded.
    """
    entries = _entries(folder)
    names = {each.name for each in entries}
    if _CONFIG in names:
        raise ConfigError(
            f"{folder} is the folder of one model but must be the one around it; "
            f"name {folder.absolute().parent}"
        )
    if "config.json" in names:
        raise ConfigError(f"{folder} is a checkpoint; name it by --model, for {_FORM}")
    if loads_all:
        _check_models(folder, [each for each in entries if not each.name.startswith(".")])


def _check_models(folder: Path, entries: list[Path]) -> None:
    models = [each for each in entries if each.is_dir()]
    if not models:
        raise ConfigError(f"model repository {folder} holds no model; {_FORM}")
    for model in models:
        if not any(each.name.isdecimal() for each in _entries(model)):
            raise ConfigError(
                f"model {model.name!r} in {folder} has no version; make the folder {model / '1'}"
            )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
