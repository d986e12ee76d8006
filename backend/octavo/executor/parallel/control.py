"""A ring of bytes in shared memory: one writer says each message once, every reader hears it.

Messages arrive whole and in order. A reader that waits looks often at first, then sleeps until the
kernel wakes it. The memory has no name: it is gone with the last process that has its descriptor.
Knows nothing of what messages say.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

from octavo.errors import EngineError

#: Bytes of messages that the slowest reader may be behind; a longer message goes in pieces.
CAPACITY = 1 << 20

#: Each position has a cache line of its own.
_LINE_BYTES = 64
_LENGTH_BYTES = 8

#: How long a reader looks before it sleeps: about what lies between two steps at a good pace.
_SPIN_S = 50e-6
#: How long it sleeps at most before it looks again.
_SLEEP_S = 1.0
#: A full ring is rare, and waits for a step of milliseconds.
_FULL_SLEEP_S = 100e-6

#: https://man7.org/linux/man-pages/man2/futex.2.html; numbers of the system call by machine.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Memory:
    """The ring as its writer and its readers see it.

        line 0       bytes written since the start
        line 1 + i   bytes that reader i has read
        the rest     CAPACITY bytes: position p lies at p % CAPACITY

    Positions only grow, and are written behind what they announce.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        self._start = (1 + num_readers) * _LINE_BYTES
        memory = mmap.mmap(fd, self._start + CAPACITY)
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._written = ctypes.c_uint32.from_buffer(memory)
        self._libc = ctypes.CDLL(None)

    @staticmethod
    def size(num_readers: int) -> int:
        return (1 + num_readers) * _LINE_BYTES + CAPACITY

    def get(self, line: int) -> int:
        return self._words[line * _LINE_BYTES // 8]

    def set(self, line: int, position: int) -> None:
        self._words[line * _LINE_BYTES // 8] = position

    def write(self, position: int, data: bytes | memoryview) -> None:
        for first, last, place in self._spans(position, len(data)):
            self._bytes[place : place + last - first] = data[first:last]

    def read(self, position: int, length: int) -> bytes:
        spans = self._spans(position, length)
        return b"".join(self._bytes[place : place + last - first] for first, last, place in spans)

    def _spans(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """Return (first, last, place in memory) of the pieces of some bytes, at most two."""
        place = position % CAPACITY
        head = min(length, CAPACITY - place)
        spans = [(0, head, self._start + place), (head, length, self._start)]
        return [span for span in spans if span[0] < span[1]]

    def wake(self) -> None:
        """Wake all who sleep."""
        self._futex(_FUTEX_WAKE, _EVERYBODY, None)

    def sleep_at(self, written: int) -> None:
        """Sleep until somebody wakes us, unless more than `written` bytes are there already."""
        seconds, fraction = divmod(_SLEEP_S, 1.0)
        self._futex(_FUTEX_WAIT, written % 2**32, _TimeSpec(int(seconds), int(fraction * 1e9)))

    def _futex(self, operation: int, value: int, timeout: _TimeSpec | None) -> None:
        number = _FUTEX.get(platform.machine())
        if number is None:
            time.sleep(0.0 if timeout is None else _FULL_SLEEP_S)
            return
        address = ctypes.byref(self._written)
        limit = None if timeout is None else ctypes.byref(timeout)
        self._libc.syscall(
            ctypes.c_long(number), address, ctypes.c_int(operation), ctypes.c_uint(value), limit
        )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ControlWriter:
    """The end that speaks.

    Args:
        num_readers: how many hear it; each must read everything.
    """

    def __init__(self, num_readers: int) -> None:
        self.fd = os.memfd_create("octavo-control")
        """Descriptor of the memory, for the readers' processes to inherit."""
        os.ftruncate(self.fd, _Memory.size(num_readers))
        self._memory = _Memory(self.fd, num_readers)
        self._lines = range(1, 1 + num_readers)
        self._position = 0

    def send(self, message: bytes, timeout_s: float) -> None:
        """Say a message; wait while the ring is full.

        Raises:
            EngineError: a reader does not make room within `timeout_s`.
        """
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        # Lengths lie at multiples of their size, and so never in two pieces.
        padding = bytes(-len(message) % _LENGTH_BYTES)
        left = memoryview(length + message + padding)
        deadline_s = time.monotonic() + timeout_s
        while left:
            room = self._room()
            if not room:
                if time.monotonic() > deadline_s:
                    raise EngineError("the control ring is full: a rank does not read it")
                time.sleep(_FULL_SLEEP_S)
                continue
            self._memory.write(self._position, left[:room])
            self._position += len(left[:room])
            left = left[room:]
            self._memory.set(0, self._position)
            self._memory.wake()

    def close(self) -> None:
        """Give the descriptor back; the readers keep theirs."""
        os.close(self.fd)

    def _room(self) -> int:
        return CAPACITY - self._position + min(map(self._memory.get, self._lines))


class ControlReader:
    """An end that hears.

    Args:
        fd: the writer's descriptor, inherited.
        num_readers: as the writer has it.
        index: which of them this is.
    """

    def __init__(self, fd: int, num_readers: int, index: int) -> None:
        self._memory = _Memory(fd, num_readers)
        os.close(fd)
        self._line = 1 + index
        self._position = 0

    def receive(self) -> bytes:
        """Wait for the next message and return it."""
        length = int.from_bytes(self._take(_LENGTH_BYTES), "little")
        return self._take(length + -length % _LENGTH_BYTES)[:length]

    def _take(self, length: int) -> bytes:
        pieces = []
        while length:
            count = min(length, self._wait())
            pieces.append(self._memory.read(self._position, count))
            self._position += count
            length -= count
            self._memory.set(self._line, self._position)
        return b"".join(pieces)

    def _wait(self) -> int:
        """Return how many bytes there are to read, at least 1."""
        until_s = time.perf_counter() + _SPIN_S
        while (written := self._memory.get(0)) == self._position:
            if time.perf_counter() < until_s:
                os.sched_yield()
            else:
                self._memory.sleep_at(written)
        return written - self._position
