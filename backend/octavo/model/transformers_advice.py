"""Keeps advice for other users of transformers out of the log.

Wherever a package is missing that has faster code for a model, transformers says so for each
function, also where a model is only tried out, or on a CPU, for which these packages have none.
Knows nothing of models.
"""

from __future__ import annotations

import logging

_SOURCES = ("transformers.integrations.hub_kernels",)


def silence_advice() -> None:
    """Let through only the errors of what gives such advice."""
    for name in _SOURCES:
        logging.getLogger(name).setLevel(logging.ERROR)
