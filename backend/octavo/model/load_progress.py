"""How far the loading of a large model has come, in lines of the log now and then.

Knows nothing of what is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

#: Nothing is said of what takes less.
INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


def logged(
    items: Iterable[T], total: int, unit: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Yield the items, and log every few seconds how many of them have been dealt with.

    Args:
        items: what is loaded, one after the other.
        total: how many there are.
        unit: what they are called, in the plural.
        clock: the time in seconds.
    """
    started_s = said_s = clock()
    for count, item in enumerate(items):
        now_s = clock()
        if now_s - said_s >= INTERVAL_S:
            said_s = now_s
            logger.info("weights: %d of %d %s in %.0f s", count, total, unit, now_s - started_s)
        yield item


@contextmanager
def transformers_logged() -> Iterator[None]:
    """Have what transformers loads meanwhile told in the log, in the place of its bars."""
    # Imported late: the native decoder needs none of it.
    from transformers.utils import logging as transformers_logging

    def make_bar(factory: Callable[..., Any], args: tuple[Any, ...], values: dict[str, Any]) -> Any:
        if values.get("desc") == "Loading weights" and args:
            return logged(args[0], len(args[0]), "tensors")
        return factory(*args, **{**values, "disable": True})

    former = transformers_logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(former)
