"""What the engine process and its owner say to each other, one pickled object at a time.

To the engine: a `Request`, an `Abort`, an `Inspect`, a `Shutdown`; in a process of its own, its
`EngineConfig` first. From the engine: one `EngineReady` or `EngineFailed`, then a `StepOutput` a
step, an `Inspected` for each `Inspect`, and a `StopRequested` when its process gets SIGTERM. Lives
in a module without torch, because both ends import it to read the other's messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.inspection import Inspection
from octavo.request import EngineInfo, FinishReason


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one of its n answers.

    If the reason is `STOP`, a last output without tokens tells where its time went; after any other
    reason nothing more is output.
    """

    request_id: str
    reason: FinishReason
    index: int | None = None
    """Which of the answers; None means all."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answer with an `Inspected` of the same id, between two steps."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The engine's queues and blocks when an `Inspect` was read."""

    request_id: str
    inspection: Inspection


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine after the current step; live requests get no answer."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The model is loaded and requests may come."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The engine's process was asked to end, which is for its owner to do.

    Whoever stops a server tells its whole process group, and Triton tells its models nothing while
    requests run: this is how a model learns that it is time to drain.
    """


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not start, or a step failed so that it cannot go on; it ends now."""

    message: str
