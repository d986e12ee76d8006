"""Plays a load over one gRPC stream, which is how Triton's own load generators drive a server.

One thread reads the answers to all requests, so that little of the machine's time goes to the
client. Knows nothing of who starts the server.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.peers.loads import Load
from benchmarks.peers.side import Reply, Unavailable
from benchmarks.workload import Job
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

_MODEL = "octavo"


def play_on_one_stream(url: str, load: Load) -> list[Reply]:
    """Send each request when it has arrived and has a seat; return when all have been answered.

    Raises:
        Unavailable: a request failed.
    """
    inputs = [_inputs(job) for job in load.jobs]
    with InferenceServerClient(url) as client:
        answers = _Answers(load)
        client.start_stream(answers.take)
        try:
            for index, each in enumerate(inputs):
                answers.wait_until_due(index)
                client.async_stream_infer(_MODEL, each, request_id=str(index))
        except InferenceServerException as error:  # the stream has ended
            raise Unavailable(str(error)) from error
        answers.wait()
    return answers.replies()


class _Answers:
    """What comes back, by the number of the request; `take` is called by the stream's thread."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._seats = threading.Semaphore(load.concurrency)
        self._failure: Exception | None = None
        self._sent_s = [0.0] * len(load.jobs)
        self._token_s: list[list[float]] = [[] for _ in load.jobs]
        self._started_s = time.monotonic()

    def wait_until_due(self, index: int) -> None:
        """Wait for a seat and for the request's arrival; it counts as sent then."""
        self._take_seat()
        time.sleep(max(0.0, self._load.arrivals_s[index] - self._now_s()))
        self._sent_s[index] = self._now_s()

    def take(self, result: Any, error: Exception | None) -> None:
        """Note when tokens came; the last response frees the seat, and an error frees all."""
        if error is not None:
            self._failure = error
            self._seats.release(self._load.concurrency)
            return
        response = result.get_response()
        count = int(result.as_numpy("num_output_tokens")[0])
        self._token_s[int(response.id)] += [self._now_s()] * count
        if response.parameters["triton_final_response"].bool_param:
            self._seats.release()

    def wait(self) -> None:
        """Wait until every request has its last response."""
        for _ in range(self._load.concurrency):
            self._take_seat()

    def replies(self) -> list[Reply]:
        """Return what was seen, in the order of the requests."""
        return list(map(Reply, self._sent_s, map(tuple, self._token_s)))

    def _take_seat(self) -> None:
        self._seats.acquire()
        if self._failure is not None:
            raise Unavailable(str(self._failure))

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s


def _inputs(job: Job) -> list[Any]:
    parameters = {"max_tokens": job.num_output_tokens, "temperature": 0, "ignore_eos": True}
    return [
        _input("input_ids", np.array(job.prompt_token_ids, np.int32)),
        _input("sampling_parameters", np.array([json.dumps(parameters).encode()], np.object_)),
        _input("stream", np.array([True])),
        _input("return_num_output_tokens", np.array([True])),
    ]


def _input(name: str, values: npt.NDArray[Any]) -> Any:
    tensor = InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor
