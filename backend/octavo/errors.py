"""Every exception Octavo raises on purpose, and the server code each one answers with.

    OctavoError
    ├── ConfigError              an engine option, checkpoint or machine cannot be served
    │   ├── NotPaged             the model cannot run over paged KV
    │   └── NotMade              transformers makes no model of the checkpoint that writes text
    ├── LaunchError              the local Triton server did not start or ended by itself
    ├── RequestError             the request is at fault; it alone ends
    │   ├── InvalidRequest       a tensor, key or value is wrong
    │   └── PromptTooLong        the prompt can never fit the context or the block pool
    ├── QueueFull                the engine takes no more requests for now
    ├── RequestCancelled         the client went away or the deadline passed
    └── EngineError              our fault
        └── EngineDead           the engine process is gone or draining

Messages say what is wrong, the value given and what is allowed, in one sentence.
"""


class OctavoError(Exception):
    """Root of every exception Octavo raises on purpose."""


class ConfigError(OctavoError):
    """An engine option, a checkpoint or the machine cannot be served."""


class NotPaged(ConfigError):
    """The model cannot run over paged KV; the traditional mode may still serve it."""


class NotMade(ConfigError):
    """Transformers makes no model of the checkpoint that writes text."""


class LaunchError(OctavoError):
    """The local Triton server did not start or ended by itself."""


class RequestError(OctavoError):
    """The request is at fault; it alone ends."""


class InvalidRequest(RequestError):
    """A tensor, key or value of the request is wrong."""


class PromptTooLong(RequestError):
    """The prompt can never fit the context or the block pool."""


class QueueFull(OctavoError):
    """The engine takes no more requests for now."""


class RequestCancelled(OctavoError):
    """The client went away or the request's deadline passed."""


class EngineError(OctavoError):
    """The engine failed; the request is not at fault."""


class EngineDead(EngineError):
    """The engine process is gone, restarting or draining."""


# First match wins, so subclasses stand above their bases.
_CODES: tuple[tuple[type[OctavoError], str], ...] = (
    (RequestError, "INVALID_ARG"),
    (QueueFull, "UNAVAILABLE"),
    (EngineDead, "UNAVAILABLE"),
    (RequestCancelled, "CANCELLED"),
    (OctavoError, "INTERNAL"),
)


def code_of(error: BaseException) -> str:
    """Return the name of the server code that `error` answers with."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of others says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shown(value: object) -> str:
    """Return `value` as an error message shows it: its repr, cut to 80 characters."""
    try:
        return repr(value)[:80]
    except ValueError:  # an integer of more digits than Python agrees to print
        return "a number of thousands of digits"
    except RecursionError:  # JSON may be read a little deeper than what it says can be printed
        return "a value of hundreds of levels"
