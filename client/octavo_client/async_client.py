"""The asyncio client: `Client` with `await`, for use inside one event loop.

Knows nothing of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from octavo_client.answer import Completion, Delta
from octavo_client.codec import (
    Messages,
    Prompt,
    ResponseReader,
    encode_health,
    encode_inspection,
    encode_probe,
    encode_request,
)
from octavo_client.engine_health import EngineHealth
from octavo_client.errors import OctavoClientError, RequestCancelled
from octavo_client.transport import (
    DEFAULT_KEEPALIVE_S,
    STREAM_CODERS,
    STREAM_METHOD,
    StreamState,
    call_metadata,
    channel_options,
    closed_error,
    time_limit,
)


class AsyncDeltaStream:
    """The answers to one request, delta by delta; an async iterator and context manager.

    Closing it, leaving its `async with` block, cancelling the task that reads it or dropping
    the last reference before the end cancels the request on the server.
    """

    def __init__(self, client: AsyncClient, call: Any, timeout_s: float | None) -> None:
        self._client = client  # a connection without owner would close under its streams
        self._call = call
        self._state = StreamState(client.url, timeout_s)
        self._reader = ResponseReader()
        self._unread: deque[Delta] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._state.closed:
            raise StopAsyncIteration
        if self._unread:
            return self._unread.popleft()
        try:
            response = await self._read()
            if response is not grpc.aio.EOF:
                self._unread.extend(await self._take(response))
                return self._unread.popleft()
            failure = self._state.end(None)
        except grpc.RpcError as error:
            failure = self._state.end(error)
        except BaseException:
            self._cancel()
            raise
        if failure is None:
            raise StopAsyncIteration
        raise failure

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC reports a call that was cancelled here as if the task had been.
            raise RequestCancelled("the stream was closed while it was read") from None

    async def _take(self, response: Any) -> list[Delta]:
        """Return what a response brings; after the last, wait until the server ends the call."""
        try:
            deltas, is_last = self._reader.read(response)
        except OctavoClientError:
            await self._await_end()
            raise
        if is_last:
            await self._await_end()
            self._state.complete = True
        return deltas

    async def _await_end(self) -> None:
        # Triton 2.51 keeps an unloaded model for ever whose call was cancelled just before its end.
        with contextlib.suppress(grpc.RpcError, RequestCancelled):
            await self._read()

    async def close(self) -> None:
        """Cancel the request on the server, unless it has ended; safe to call twice."""
        self._cancel()

    def _cancel(self) -> None:
        self._state.closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()


class AsyncClient:
    """A connection to one model of one server, for any number of tasks of one event loop.

    Make it inside the running loop. Arguments are those of `Client`.
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        model: str = "octavo",
        *,
        timeout_s: float | None = None,
        keepalive_s: float = DEFAULT_KEEPALIVE_S,
        credentials: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = time_limit(timeout_s, None)
        self._metadata = call_metadata(headers)
        options = channel_options(url, keepalive_s)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url, options)
        else:
            self._channel = grpc.aio.secure_channel(url, credentials, options)
        self._stream_call = self._channel.unary_stream(STREAM_METHOD, **STREAM_CODERS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncDeltaStream:
        """Send one request and return its answer as it grows; arguments as in `Client.stream`.

        Parameters are `n`, `beam_width`, `length_penalty`,
        `temperature`, `top_k`, `top_p`, `min_p`,
        `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`,
        `allowed_token_ids`, `bad_words`, `structured_outputs`, `lora_name`, `logprobs`,
        `prompt_logprobs`,
        `seed`, `max_tokens`, `min_tokens`, `stop`, `stop_token_ids`, `ignore_eos`,
        `include_stop_str_in_output`, `skip_special_tokens`,
        `spaces_between_special_tokens`, and of scheduling `priority`,
        `deadline_ms`, `tenant`, `cache_salt`.
        """
        request = encode_request(self.model, Prompt(prompt, messages, input_ids), True, params)
        return self._send(request, timeout_s)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """Send one request, wait for all of it and return it; as `Client.generate`.

        Parameters are `n`, `beam_width`, `length_penalty`,
        `temperature`, `top_k`, `top_p`, `min_p`,
        `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`,
        `allowed_token_ids`, `bad_words`, `structured_outputs`, `lora_name`, `logprobs`,
        `prompt_logprobs`,
        `seed`, `max_tokens`, `min_tokens`, `stop`, `stop_token_ids`, `ignore_eos`,
        `include_stop_str_in_output`, `skip_special_tokens`,
        `spaces_between_special_tokens`, and of scheduling `priority`,
        `deadline_ms`, `tenant`, `cache_salt`.
        """
        request = encode_request(self.model, Prompt(prompt, messages, input_ids), False, params)
        async with self._send(request, timeout_s) as deltas:
            return Completion.from_deltas([delta async for delta in deltas])

    async def is_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers within `timeout_s` that the model is loaded."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            response = await self._stub.ModelReady(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError:
            return False
        except grpc.aio.UsageError:
            raise closed_error(self.url) from None
        return bool(response.ready)

    async def health(self, timeout_s: float = 10.0) -> float:
        """Generate one token and return how long that took, in seconds; see `Client.health`.

        Raises:
            OctavoClientError: no token came within `timeout_s`, and why.
        """
        started = perf_counter()
        async with self._send(encode_probe(self.model), timeout_s) as deltas:
            Completion.from_deltas([delta async for delta in deltas])
        return perf_counter() - started

    async def engine_health(self, timeout_s: float = 10.0) -> EngineHealth:
        """Return how the engine is; see `Client.engine_health`."""
        async with self._send(encode_health(self.model), timeout_s) as deltas:
            completion = Completion.from_deltas([delta async for delta in deltas])
        return EngineHealth.from_json(completion.text)

    async def inspect(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the engine's queues and KV blocks; see `Client.inspect`."""
        async with self._send(encode_inspection(self.model), timeout_s) as deltas:
            completion = Completion.from_deltas([delta async for delta in deltas])
        state: dict[str, Any] = json.loads(completion.text)
        return state

    async def close(self) -> None:
        """Cancel all live streams and drop the connection; safe to call twice."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _send(self, request: Any, timeout_s: float | None) -> AsyncDeltaStream:
        limit = time_limit(timeout_s, self._timeout_s)
        try:
            call = self._stream_call(request, timeout=limit, metadata=self._metadata)
        except grpc.aio.UsageError:  # gRPC's answer to a call on a closed channel
            raise closed_error(self.url) from None
        return AsyncDeltaStream(self, call, limit)
