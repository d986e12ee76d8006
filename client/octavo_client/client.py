"""The blocking client: one connection, any number of streams, from any number of threads.

Knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.experimental
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
from octavo_client.errors import OctavoClientError
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


class DeltaStream:
    """The answers to one request, delta by delta; an iterator and a context manager.

    Closing it, leaving its `with` block or dropping the last reference before the end cancels
    the request on the server. One thread reads it; any thread may close it.
    """

    def __init__(self, client: Client, call: Any, timeout_s: float | None) -> None:
        self._client = client  # a connection without owner would close under its streams
        self._call = call
        self._state = StreamState(client.url, timeout_s)
        self._reader = ResponseReader()
        self._unread: deque[Delta] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._state.closed:
            raise StopIteration
        if self._unread:
            return self._unread.popleft()
        failure: OctavoClientError | None
        try:
            self._unread.extend(self._take(next(self._call)))
            return self._unread.popleft()
        except StopIteration:
            failure = self._state.end(None)
        except grpc.RpcError as error:
            failure = self._state.end(error)
        except BaseException:
            self.close()
            raise
        if failure is None:
            raise StopIteration
        raise failure

    def _take(self, response: Any) -> list[Delta]:
        """Return what a response brings; after the last, wait until the server ends the call."""
        try:
            deltas, is_last = self._reader.read(response)
        except OctavoClientError:
            self._await_end()
            raise
        if is_last:
            self._await_end()
            self._state.complete = True
        return deltas

    def _await_end(self) -> None:
        # Triton 2.51 keeps an unloaded model for ever whose call was cancelled just before its end.
        with contextlib.suppress(StopIteration, grpc.RpcError):
            next(self._call)

    def close(self) -> None:
        """Cancel the request on the server, unless it has ended; safe to call twice."""
        self._state.closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to one model of one server; safe to use from many threads at once.

    Args:
        url: host and gRPC port.
        timeout_s: limit of each request from sending to its last token; None means none.
        keepalive_s: a server that has been silent for so long is pinged, and given up for
            lost 10 s later. Stock servers drop a connection pinged more often than every 300 s.
        credentials: what `tls_credentials` returns, or other `grpc.ChannelCredentials`; None means
            an unencrypted connection.
        headers: sent with every call, such as the key of a restricted protocol.
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
        # A reader that Ctrl-C hits inside gRPC keeps its lock; with a thread of gRPC's own between
        # reader and connection, which needs that lock, the whole client would stand still.
        options = [
            *channel_options(url, keepalive_s),
            (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(url, options)
        else:
            self._channel = grpc.secure_channel(url, credentials, options)
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
    ) -> DeltaStream:
        """Send one request and return its answer as it grows.

        Exactly one of `prompt`, `messages` and `input_ids` must be given. With `n` above 1 each
        delta is of one of the n answers, which its `index` names.

        Args:
            prompt: text, used as it is.
            messages: dicts with `role` and `content` in OpenAI's format, or a dict with such
                `messages` and `tools`; the server renders the chat template.
            input_ids: the prompt as token ids.
            timeout_s: overrides the client's; `math.inf` lifts it.
            params: `n`, `beam_width`, `length_penalty`,
                `temperature`, `top_k`, `top_p`, `min_p`,
                `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`,
                `allowed_token_ids`, `bad_words`, `structured_outputs`, `lora_name`,
                `logprobs`, `prompt_logprobs`, `seed`, `max_tokens`, `min_tokens`,
                `stop`, `stop_token_ids`, `ignore_eos`,
                `include_stop_str_in_output`, `skip_special_tokens`,
                `spaces_between_special_tokens`, and of scheduling `priority`,
                `deadline_ms`, `tenant`, `cache_salt`.

        Raises:
            OctavoClientError: here if the request cannot be sent, else from the iterator.
        """
        request = encode_request(self.model, Prompt(prompt, messages, input_ids), True, params)
        return self._send(request, timeout_s)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """Send one request, wait for all of it and return it; arguments as in `stream`.

        With `n` above 1 its `answers` are n; what it has by itself is of the first.

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
        with self._send(request, timeout_s) as deltas:
            return Completion.from_deltas(deltas)

    def is_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers within `timeout_s` that the model is loaded."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s, metadata=self._metadata)
            return bool(answer.ready)
        except grpc.RpcError:
            return False
        except ValueError:
            raise closed_error(self.url) from None

    def health(self, timeout_s: float = 10.0) -> float:
        """Generate one token and return how long that took, in seconds.

        The request's id in the server's log is `octavo-health`.

        Raises:
            OctavoClientError: no token came within `timeout_s`, and why.
        """
        started = perf_counter()
        with self._send(encode_probe(self.model), timeout_s) as deltas:
            Completion.from_deltas(deltas)
        return perf_counter() - started

    def engine_health(self, timeout_s: float = 10.0) -> EngineHealth:
        """Return how the engine is; answered at once, even while it is dead, busy or frozen.

        Raises:
            OctavoClientError: no answer came within `timeout_s`: the model cannot be used.
        """
        with self._send(encode_health(self.model), timeout_s) as deltas:
            return EngineHealth.from_json(Completion.from_deltas(deltas).text)

    def inspect(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the engine's queues and KV blocks as they are between two of its steps.

        Keys are those of `octavo.inspection.Inspection`; no prompt and no token is in it.

        Raises:
            InvalidRequest: the engine's option `allow_inspect` is false.
        """
        with self._send(encode_inspection(self.model), timeout_s) as deltas:
            state: dict[str, Any] = json.loads(Completion.from_deltas(deltas).text)
        return state

    def close(self) -> None:
        """Cancel all live streams and drop the connection; safe to call twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, request: Any, timeout_s: float | None) -> DeltaStream:
        limit = time_limit(timeout_s, self._timeout_s)
        try:
            call = self._stream_call(request, timeout=limit, metadata=self._metadata)
        except ValueError:  # gRPC's answer to a call on a closed channel
            raise closed_error(self.url) from None
        return DeltaStream(self, call, limit)
