"""Client library of Octavo on `tritonclient`; installs without torch.

Imports nothing of `octavo`: it knows the server by its tensors and status codes alone.
"""

from octavo_client.answer import Answer, Completion, Delta, Timing, TokenLogprob
from octavo_client.async_client import AsyncClient, AsyncDeltaStream
from octavo_client.client import Client, DeltaStream
from octavo_client.engine_health import EngineHealth
from octavo_client.errors import (
    InvalidRequest,
    ModelNotFound,
    OctavoClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    Unavailable,
)
from octavo_client.transport import tls_credentials

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncDeltaStream",
    "Client",
    "Completion",
    "Delta",
    "DeltaStream",
    "EngineHealth",
    "InvalidRequest",
    "ModelNotFound",
    "OctavoClientError",
    "RequestCancelled",
    "RequestTimeout",
    "ServerError",
    "Timing",
    "TokenLogprob",
    "Unavailable",
    "tls_credentials",
]
