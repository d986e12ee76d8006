"""The instruction sets that the native code is written for, and which of them this processor has.

Knows nothing of compilers beyond the options that select an instruction set.
"""

import platform
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple


class InstructionSet(NamedTuple):
    """One version of the native code: the same sources, compiled with other options."""

    name: str
    features: tuple[str, ...]
    """What the processor must have, as the kernel of the system spells it."""

    @property
    def options(self) -> list[str]:
        """Options of the compiler that let it use these instructions, and no newer ones."""
        if not self.features:
            return []
        return [*("-m" + name.replace("_", "") for name in self.features), "-mtune=native"]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")

INSTRUCTION_SETS = (
    InstructionSet("avx512-bf16", (*_AVX512, "avx512_bf16", "avx512_vnni")),
    InstructionSet("avx512", _AVX512),
    InstructionSet("avx2", _AVX2),
    InstructionSet("portable", ()),
)
"""Fastest first; the last runs on any processor."""


def usable_instruction_sets(features: Set[str] | None = None) -> list[InstructionSet]:
    """Return those of INSTRUCTION_SETS that a processor has, fastest first.

    Args:
        features: What the processor has; None for this one.
    """
    if features is None:
        features = {word for line in _processor_lines("flags") for word in line.split()}
    return [x for x in INSTRUCTION_SETS if features >= set(x.features)]


def describe_processor() -> str:
    """Return what tells this processor from others that the same options tune code for."""
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return platform.machine() + "".join(sorted(set(_processor_lines(*wanted))))


def _processor_lines(*prefixes: str) -> list[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.startswith(prefixes)]
