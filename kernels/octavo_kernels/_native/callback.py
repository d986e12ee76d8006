"""A Python function that native code calls while it runs."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int)


@contextmanager
def native_callback(function: Callable[[], None]) -> Iterator[int | None]:
    """Yield a function as an `int (*)()` that is valid until the end.

    It returns 0, or another number when native code is to stop, for nothing can be raised through
    it: what `function` raises is raised at the end.
    """
    errors: list[BaseException] = []

    def call() -> int:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        return len(errors)

    native = _FUNCTION(call)
    yield ctypes.cast(native, ctypes.c_void_p).value
    if errors:
        raise errors[0]
