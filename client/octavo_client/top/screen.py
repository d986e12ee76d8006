"""Where `octavo top` draws: over its last picture on a terminal, else below it.

Knows nothing of what is drawn.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

with contextlib.suppress(ImportError):
    import termios
    import tty

_LEAVING_KEYS = b"qQ\x04"
#: Seconds after which a terminal of another size is drawn anew at the latest.
_RESIZE_S = 0.2


class Screen(Protocol):
    """Shows a picture and waits before the next."""

    @property
    def is_live(self) -> bool:
        """Whether a picture takes the place of the last."""

    def show(self, picture: RenderableType) -> None:
        """Draw a picture."""

    def wait(self, seconds: float) -> bool:
        """Return after so many seconds, or at once and with True when the user has had enough."""


@contextlib.contextmanager
def opened(is_live: bool) -> Iterator[Screen]:
    """Give a screen, a terminal's own if `is_live` and there is one; put back what it changes."""
    console = Console(highlight=False)
    if not is_live or not console.is_terminal:
        yield _Paper(console)
        return
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        yield _Terminal(console, live)


class _Paper:
    is_live = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, picture: RenderableType) -> None:
        self._console.print(picture)

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


class _Terminal:
    is_live = True

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._size = console.size

    def show(self, picture: RenderableType) -> None:
        self._size = self._console.size
        self._live.update(picture, refresh=True)

    def wait(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        left_s = seconds
        while not _wants_to_leave(min(left_s, _RESIZE_S)):
            if self._console.size != self._size:
                self._size = self._console.size
                self._live.refresh()
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                return False
        return True


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Let keys be read as they are pressed, where that is possible, and not be shown."""
    if "termios" not in globals() or not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _wants_to_leave(timeout_s: float) -> bool:
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready) and any(key in _LEAVING_KEYS for key in os.read(sys.stdin.fileno(), 64))
