"""What no model's config says: refused before transformers makes anything by it.

Transformers makes a module for each layer before a tensor shows whether there are so many, and
its messages on numbers that fit no register are long. Knows nothing of any architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError, shown

#: Far beyond any model.
MOST_LAYERS = 4096
_MOST = 2**63 - 1
#: `num_hidden_layers`, `n_layer`, `decoder_layers`, ...: all that architectures call their number.
_COUNTS_LAYERS = re.compile(r"(?:^|_)layers?$")


def check_bounds(values: Mapping[str, Any]) -> None:
    """Refuse a transformers config with numbers or names that no model has.

    Raises:
        ConfigError: names a field with too many layers or too large an integer, or `architectures`
            that are not names.
    """
    architectures = values.get("architectures")
    if architectures and not _are_names(architectures):
        raise _error("architectures", architectures, "a list of names")
    # Objects within objects, however deep.
    rest: list[tuple[str, Any]] = list(values.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, Mapping):
            rest.extend(value.items())
        elif isinstance(value, list):
            rest.extend((name, each) for each in value)
        elif isinstance(value, int):
            most = MOST_LAYERS if _COUNTS_LAYERS.search(name) else _MOST
            if abs(value) > most:
                raise _error(name, value, f"at most {most:,}")


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _error(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"the model config has {name} = {shown(value)} but must have {allowed}")
