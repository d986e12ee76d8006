"""The part of `triton_python_backend_utils` that this package uses, as types.

The module itself exists only inside a Triton stub, and its tensor and response classes only after
`model.py` has been imported; so it is passed along as a value and looked into late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt


class InputTensor(Protocol):
    """A tensor of a request; its memory is the server's until `execute` returns."""

    def name(self) -> str:
        """Return its name."""

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return its values; strings as objects of type bytes."""


class ResponseSender(Protocol):
    """Where the responses of one request go."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send a response, the final flag or both; blocks for a round trip to the server."""

    def is_cancelled(self) -> bool:
        """Ask the server whether the client is gone; a round trip, forbidden after the final."""


class InferenceTrace(Protocol):
    """The server's trace of one request."""

    def get_context(self) -> str | None:
        """Return `traceparent` and `tracestate` as a JSON object; None if it is not traced."""


class InferenceRequest(Protocol):
    """One request of a client; it is the server's again once `execute` returns."""

    def inputs(self) -> Sequence[InputTensor]:
        """Return the tensors that were sent."""

    def parameters(self) -> str:
        """Return the request's own parameters as a JSON object."""

    def timeout(self) -> int:
        """Return the protocol's time limit in microseconds, 0 if none."""

    def request_id(self) -> str:
        """Return the name its client gave it, empty if none."""

    def trace(self) -> InferenceTrace:
        """Return the server's trace of it."""

    def get_response_sender(self) -> ResponseSender:
        """Return where responses go; outlives the request."""


class Metric(Protocol):
    """One series of a family."""

    def set(self, value: float) -> None:
        """Set a gauge; a round trip to the server."""

    def increment(self, value: float) -> None:
        """Let a counter grow; a round trip to the server."""

    def observe(self, value: float) -> None:
        """Give a histogram a sample; a round trip to the server."""


class MetricFamily(Protocol):
    """One metric by name; it disappears from the server with this object."""

    def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Metric:
        """Make a series; a histogram needs the upper bounds of its buckets."""


class AutoCompleteConfig(Protocol):
    """The model configuration while it is completed."""

    def as_dict(self) -> dict[str, Any]:
        """Return what config.pbtxt says."""

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the batch size or raise ValueError if it was set higher."""

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        """Set `decoupled` or raise ValueError if it was set otherwise."""

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Add an input or raise ValueError if one of that name differs."""

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Add an output or raise ValueError if one of that name differs."""


class PbUtils(Protocol):
    """The module; its classes are of type Any because they are made by calling."""

    Tensor: Any
    InferenceResponse: Any
    TritonError: Any
    MetricFamily: Any
    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int
