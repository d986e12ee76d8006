"""Long prompts are rendered and tokenized beside the thread that takes requests in.

How much may wait for that is bounded, for every prompt that waits is held whole. Knows nothing of
what a prompt is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from octavo.errors import QueueFull

#: From these lengths on (characters, or ids) prompts get a thread of their own: 1 MB takes most of
#: a second, in which short prompts need not wait, and 8 MB may take ten, in which other long ones
#: need not.
LONG_PROMPT = 32_768
HUGE_PROMPT = 1_048_576
#: Characters, or ids, of all prompts that wait for one of the threads, beside one prompt alone.
MAX_WAITING_LENGTH = 67_108_864


class PromptThreads:
    """One thread for long prompts and one for huge ones; short ones are the caller's."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-prompts")
        self._waiting_length = 0
        self._lock = threading.Lock()

    def run(self, length: int, work: Callable[[], None]) -> None:
        """Do the work of a prompt of a length: here if it is short, else soon in a thread.

        Raises:
            QueueFull: too much waits already.
        """
        if length < LONG_PROMPT:
            work()
            return
        with self._lock:
            if self._waiting_length and self._waiting_length + length > MAX_WAITING_LENGTH:
                raise QueueFull(
                    f"long prompts of {self._waiting_length:,} characters wait to be tokenized, "
                    f"and of {MAX_WAITING_LENGTH:,} at most may; try again later"
                )
            self._waiting_length += length
        (self._long if length < HUGE_PROMPT else self._huge).submit(self._run, length, work)

    def close(self) -> None:
        """Finish what waits, then end the threads."""
        self._long.shutdown(wait=True)
        self._huge.shutdown(wait=True)

    def _run(self, length: int, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._waiting_length -= length
