"""Whether the tensors that are there are those that should be, by name and shape.

Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import ConfigError

_NAMES_SHOWN = 4


def check_shapes(
    where: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    not_float: list[str],
) -> None:
    """Refuse tensors that are not exactly the expected ones.

    Args:
        where: they are.
        expected: shape by name.
        found: shape by name.
        not_float: what messages call those whose dtype is not one of floats.

    Raises:
        ConfigError: names what is missing, unexpected or mis-shaped.
    """
    faults = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrong shape": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
        "dtype not supported": not_float,
    }
    refuse_faults(where, faults)


def refuse_faults(where: str, faults: Mapping[str, list[str]]) -> None:
    """Raise ConfigError if tensors have faults; it lists what is found by the name of each."""
    texts = [f"{fault}: {some_names(names)}" for fault, names in faults.items() if names]
    if texts:
        raise ConfigError(f"the tensors in {where} do not fit its config; {'; '.join(texts)}")


def some_names(names: list[str]) -> str:
    """Return names as a message lists them: the first ones, and how many more there are."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
