"""Gives memory that this process has freed back to the system; knows nothing of what it held."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Hand back every whole page that the C library keeps for later; only glibc can be asked to.

    What is freed between things that stay would else be kept until the process ends. To search for
    it takes milliseconds, and huge pages become small ones where something is taken out of them:
    for after a load, and not for a process whose speed is that of its memory.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)
