"""Finds environment variables that look like engine options and are none.

A misspelt option in `engine.json` fails the load; a variable may be meant for somebody else, so it
is only told of. Knows nothing of what the options mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from octavo.config import ENVIRONMENT_PREFIX, EngineConfig

#: Variables of ours that set no engine option: of commands, of tests and between processes; and
#: those that Kubernetes sets in every container for a service of the name octavo.
_OTHERS = re.compile(
    r"(SERVE|WATCH|GENERATE|CHAT|HEALTH|INSPECT|TOP|BENCH|TEST)_.+"
    r"|KERNELS|CPU_INSTRUCTIONS|PYTHON|RUNTIME"
    r"|(.+_)?SERVICE_(HOST|PORT)(_.+)?|(.+_)?PORT(_\d+_.+)?"
)


def stray_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that sets no option and belongs to nobody else."""
    known = [field.name for field in fields(EngineConfig)]
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name.lower() in known or _OTHERS.fullmatch(name):
            continue
        nearest = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {ENVIRONMENT_PREFIX}{nearest[0].upper()}?" if nearest else ""
        yield f"variable {variable[:80]} sets no engine option and is ignored{hint}"
