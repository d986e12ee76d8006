"""A heap of names by keys that rise while it looks away. Knows nothing of what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

#: Outdated entries that are kept before a heap is built anew.
MAX_SPARE_ENTRIES = 64

Name = TypeVar("Name")


class LateHeap(Generic[Name]):
    """The lowest of some names; an entry may lag behind its name's key, never be above it.

    Args:
        names: those that count, and no others; looked at again and again.
        key: of one of `names`. When it falls, `push` must be called again.
    """

    def __init__(self, names: Collection[Name], key: Callable[[Name], Any]) -> None:
        self._names = names
        self._key = key
        self._entries: list[tuple[Any, Name]] = []

    def __len__(self) -> int:
        """Return the number of entries, outdated ones too."""
        return len(self._entries)

    def push(self, name: Name) -> None:
        """Take a name that is new, or whose key has fallen."""
        heappush(self._entries, (self._key(name), name))
        if len(self._entries) > 2 * len(self._names) + MAX_SPARE_ENTRIES:
            self._entries = [(self._key(name), name) for name in self._names]
            heapify(self._entries)

    def lowest(self) -> tuple[Any, Name] | None:
        """Return the lowest key of now and its name; None if there is no name."""
        entries = self._entries
        while entries:
            listed, name = entries[0]
            if name not in self._names:
                heappop(entries)
                continue
            key = self._key(name)
            if key == listed:
                return key, name
            heapreplace(entries, (key, name))
        return None

    def entries(self) -> list[tuple[Any, Name]]:
        """Return a copy of what is listed, a heap as `heapq` has them."""
        return self._entries.copy()
