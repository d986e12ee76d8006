"""A LoRA adapter as requests and steps know it: by a name, a number and a version.

Few of a model's adapters may be in memory at once: each of those has one of so many slots. Knows
nothing of their weights, or of where they lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import OctavoError
from octavo.request_keys import refused

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Adapter:
    """One of a model's adapters."""

    number: int
    """Its place among them, from 0."""
    version: bytes
    """Digest of its files, so that KV of one version is never taken for that of another."""


class AdapterLoad(NamedTuple):
    """An adapter that is to be read into a slot, which no sequence uses until it has come."""

    number: int
    slot: int


class AdapterArrival(NamedTuple):
    """What has become of a load: `error` says why the adapter is not in its slot, if it is not."""

    number: int
    error: OctavoError | None = None


def find_adapter(name: str | None, adapters: Mapping[str, Adapter]) -> Adapter | None:
    """Return the adapter that a request names, or None if it names none.

    Raises:
        InvalidRequest: see `check_adapter_name`.
    """
    check_adapter_name(name, adapters)
    return None if name is None else adapters[name]


def check_adapter_name(name: str | None, known: Collection[str]) -> None:
    """Refuse a `lora_name` that is given and not known.

    Raises:
        InvalidRequest: shows the value and, up to a number of them, what is known.
    """
    if name is None or name in known:
        return
    if not known:
        allowed = "absent, for the model was loaded without adapters (option enable_lora)"
        raise refused("lora_name", name, allowed)
    names = sorted(known)
    listed = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    num_more = len(names) - _NAMES_SHOWN
    more = f" or {num_more:,} others" if num_more > 0 else ""
    raise refused("lora_name", name, f"one of {listed}{more}")
